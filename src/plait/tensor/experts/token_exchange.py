"""The exchange of tokens between the ranks of experts: a token travels once to each rank with experts of it.

    counts      all-gather    how many rows each rank sends to each, and how many tokens each expert gets
    tokens      all-to-all    a row for each token and rank that has experts of it
    results     all-to-all    the sum over that rank's experts, added up where the token came from

In the backward the gradient of the output takes the way of the tokens, and the gradient of the tokens that of
the results. Under uniform routing to k of E experts on `ep` ranks a token makes
`ep (1 - C(E - E/ep, k) / C(E, k))` rows instead of k, of which one in `ep` stays on its rank. Where parts of
an expert are on several ranks of `etp`, a token travels to each of them.

The host waits once, for the counts: it allocates the rows, and gives their sizes to the all-to-all. Buffers
of the largest possible size, `T min(k, ep)` rows sent and all tokens received, would need no wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from plait.plan.layout.layout import divide
from plait.ranks.accelerator import is_accelerator, sent
from plait.ranks.collectives import all_gather, all_to_all_uneven
from plait.ranks.group import Group
from plait.tensor.autograd.regathered_activations import PendingTensor
from plait.tensor.experts.copies_of_tokens import TokenRows


@dataclass(frozen=True)
class RowCounts:
    """How many rows travel between this rank and each other, as numbers on the host."""

    sent: tuple[int, ...]
    """Rows to each rank."""
    received: tuple[int, ...]
    """Rows from each rank."""
    most_sent: int
    """Rows of the rank that sends most."""
    most_received: int
    """Rows of the rank that receives most."""
    of_experts: tuple[int, ...]
    """Tokens of each expert of this rank."""

    def with_others(self, own: int) -> tuple[int, int]:
        """Return how many rows go to other ranks than the one with index `own`, and come from them."""
        return sum(self.sent) - self.sent[own], sum(self.received) - self.received[own]


@dataclass(frozen=True)
class TokenExchange:
    """Which tokens of this rank travel to which ranks of a group."""

    group: Group
    rows: TokenRows
    """The rows that this rank sends, in order of the rank that they go to, and for one rank of the token."""
    counts: RowCounts

    def start(self, tokens: Tensor) -> PendingTensor:
        """Start sending each rank its tokens; return a function that waits for those of this rank's experts.

        `tokens [T, width]`; the function returns `[rows received, width]`.
        """
        counts = self.counts
        return self._start(self.rows.copies(tokens), counts.sent, counts.received, counts.most_sent)

    def start_return(self, rows: Tensor) -> PendingTensor:
        """Start sending rows back to where tokens came from; return a function that waits for this rank's.

        `rows` are `[rows received, width]`; the function returns `[rows sent, width]`.
        """
        counts = self.counts
        return self._start(rows, counts.received, counts.sent, counts.most_received)

    def _start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], most: int) -> PendingTensor:
        width = rows.shape[1]
        result = rows.new_empty(sum(received), width)
        if rows.is_meta:
            self.group.skip("all_to_all", rows)
            return _skipped(result, rows)
        sizes = [[count * width for count in counts] for counts in (sent, received)]
        flat, out = rows.reshape(-1), result.view(-1)
        handle = all_to_all_uneven(flat, self.group, *sizes, most=most * width, out=out, checked=False)
        return lambda: handle.wait().view(-1, width)


def _skipped(result: Tensor, rows: Tensor) -> PendingTensor:
    """Return a function that returns `result`, and keeps the `rows` that are sent until it is called."""
    kept = [rows]

    def wait() -> Tensor:
        kept.clear()
        return result

    return wait


def exchange_of(
    indices: Tensor, experts: int, group: Group, etp: int, takes_all: bool = False
) -> TokenExchange:
    """Return how tokens travel to the ranks of their experts `indices [T, k]`, where -1 stands for none.

    Each `etp` neighbours of `group` hold parts of the same experts; the first hold the first experts, as
    `divide` cuts them. Communication: one all-gather of an int64 for each of `ep` parts and each expert, for
    which the host waits. On meta routing is assumed to be uniform, or, where this rank `takes_all`, to choose
    its experts for all tokens.
    """
    parts = divide(experts, group.size // etp)
    chosen = indices % (experts + 1)  # -1 becomes the number of experts
    visits = _visits(chosen, parts)
    if indices.is_meta:
        group.skip("all_gather", indices.new_empty(len(parts) + experts))
        counts = (_counts_of_one if takes_all else _uniform_counts)(indices, experts, group, etp)
    else:
        counts = _gathered_counts(visits, chosen, parts, group, etp)
    if etp > 1:
        visits = visits.repeat_interleave(etp, 1)
    ranks, tokens = _places(visits.t(), sum(counts.sent)).unbind(1)
    places = ranks.add(tokens, alpha=group.size)
    return TokenExchange(group, TokenRows.of(places, len(indices), group.size), counts)


def _visits(chosen: Tensor, parts: Sequence[range]) -> Tensor:
    """Return in which of the `parts` of all experts each token has experts: bool `[T, parts]`.

    `chosen [T, k]`: the experts of each token; their number stands for none.
    """
    ends = sent(torch.tensor([part.stop for part in parts]), chosen.device)
    visits = torch.zeros(len(chosen), len(parts) + 1, dtype=torch.bool, device=chosen.device)
    return visits.scatter_(1, torch.searchsorted(ends, chosen, right=True), True)[:, : len(parts)]


def _gathered_counts(
    visits: Tensor, chosen: Tensor, parts: Sequence[range], group: Group, etp: int
) -> RowCounts:
    """Return how many tokens each rank sends to each other rank, gathered from all ranks of the group."""
    ep, part, experts = len(parts), group.index // etp, parts[-1].stop
    of_experts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    of_experts.scatter_add_(0, chosen.flatten(), of_experts.new_ones(()).expand(chosen.numel()))
    own = torch.cat([visits.sum(0), of_experts[:experts]])
    every = all_gather(own, group, checked=False).wait().view(group.size, ep + experts)
    rows, mine = every[:, :ep], parts[part]
    most = [rows.sum(dim).amax(0, keepdim=True) for dim in (1, 0)]
    loads = every[:, ep + mine.start : ep + mine.stop].sum(0)
    read = torch.cat([rows[group.index], rows[:, part], *most, loads]).tolist()  # the only wait of the host
    to_parts, received = read[:ep], read[ep : ep + group.size]
    sent_rows = [count for count in to_parts for _ in range(etp)]
    most_sent, most_received, *of_mine = read[ep + group.size :]
    return RowCounts(tuple(sent_rows), tuple(received), most_sent * etp, most_received, tuple(of_mine))


def _uniform_counts(indices: Tensor, experts: int, group: Group, etp: int) -> RowCounts:
    """Return the counts of uniform routing, with as many tokens on every rank."""
    (tokens, top_k), ep = indices.shape, group.size // etp
    parts = divide(experts, ep)
    to_parts = [
        round(tokens * (1 - comb(experts - len(part), top_k) / comb(experts, top_k))) for part in parts
    ]
    mine = group.index // etp
    own, rows = len(parts[mine]), to_parts[mine] * group.size
    pairs = min(round(group.size * tokens * top_k * own / experts), rows * top_k)
    return RowCounts(
        tuple(count for count in to_parts for _ in range(etp)),
        (to_parts[mine],) * group.size,
        sum(to_parts) * etp,
        max(to_parts) * group.size,
        tuple(map(len, divide(pairs, own))) if own else (),
    )


def _counts_of_one(indices: Tensor, experts: int, group: Group, etp: int) -> RowCounts:
    """Return how many tokens each rank sends in the worst case: all tokens choose this rank's experts.

    Where these are fewer than k, a token has others of the parts that follow, of the first ones at last.
    """
    (tokens, top_k), ep = indices.shape, group.size // etp
    parts, mine = divide(experts, ep), group.index // etp
    left, to_parts = top_k, [0] * ep
    for part in (*range(mine, ep), *range(mine)):
        to_parts[part] = tokens if left > 0 and len(parts[part]) else 0
        left -= len(parts[part])
    each = min(top_k, len(parts[mine]))
    received = group.size * to_parts[mine]
    loads = divide(received * each, len(parts[mine])) if each else ()
    return RowCounts(
        tuple(count for count in to_parts for _ in range(etp)),
        (to_parts[mine],) * group.size,
        sum(to_parts) * etp,
        received,
        tuple(map(len, loads)),
    )


def _places(mask: Tensor, count: int) -> Tensor:
    """Return the row and column of each of the `count` elements of `mask` that are true: `[count, 2]`."""
    if is_accelerator(mask) or mask.is_meta:  # where the host would wait for the count
        return mask.nonzero_static(size=count)
    return mask.nonzero()  # six times as fast


def pack(values: Tensor, *others: Tensor) -> Tensor:
    """Return `values [n, width]`, each row followed by the bits of that row of the other tensors.

    The dtypes of others are as wide, or several times.
    """
    return torch.cat([values, *(one.contiguous().view(values.dtype) for one in others)], 1)


def unpack(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `pack` put into `rows`, of the widths and dtypes of `like`."""
    widths = [one.shape[1] * one.itemsize // rows.itemsize for one in like]
    first, *others = torch.split(rows, widths, 1)
    return [first, *(part.contiguous().view(one.dtype) for part, one in zip(others, like[1:], strict=True))]
