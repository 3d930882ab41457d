import torch


def _mask(mask, n, m):
    if isinstance(mask, str):
        s = torch.ones(n, m, dtype=torch.bool)
        return s if mask == "full" else s.tril()
    return mask


def _rep(q, k):
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def block_forward(q, k, v, mask, scale, dropout=None):
    if q.is_meta:
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    s = (q @ _rep(q, k).transpose(-1, -2) * scale).masked_fill(
        ~_mask(mask, q.shape[2], k.shape[2]), -torch.inf
    )
    lse = s.logsumexp(-1)
    return torch.exp(s - lse.nan_to_num(neginf=0)[..., None]) @ _rep(q, v), lse


def block_backward(g, q, k, v, out, lse, mask, scale, dropout=None):
    if q.is_meta:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    rk, rv = _rep(q, k), _rep(q, v)
    s = (q @ rk.transpose(-1, -2) * scale).masked_fill(~_mask(mask, q.shape[2], k.shape[2]), -torch.inf)
    p = torch.exp(s - lse[..., None])
    dv = p.transpose(-1, -2) @ g
    ds = p * (g @ rv.transpose(-1, -2) - (g * out).sum(-1, keepdim=True)) * scale
    dq, dk = ds @ rk, ds.transpose(-1, -2) @ q
    G = q.shape[1] // k.shape[1]
    fold = lambda t: t.unflatten(1, (-1, G)).sum(2)
    return dq, fold(dk), fold(dv)


def merge(out, lse, po, pl):
    new = torch.logaddexp(lse, pl)
    safe = new.nan_to_num(neginf=0)
    out.mul_(torch.exp(lse - safe)[..., None]).add_(po * torch.exp(pl - safe)[..., None])
    lse.copy_(new)
