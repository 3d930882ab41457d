"""Which layers keep positions apart. The measure: a layer run on some positions gives its output at these."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.proof.position_proof import prove_positions_apart
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.position_marks import gives_positions, keeps_positions_later, positions_may_mix

LENGTH, HIDDEN = 16, 12
PART = torch.tensor([2, 5, 6, 11])


class Call(nn.Module):
    """A layer that calls a function with its modules and parameters."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for number, part in enumerate(parts):
            setattr(self, f"part{number}", nn.Parameter(part) if isinstance(part, Tensor) else part)
        self.count = len(parts)

    def forward(self, value: Value) -> Value:
        return self.function(value, *(getattr(self, f"part{number}") for number in range(self.count)))


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, 4)).transpose(1, 2)


def causal(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, **options)


def own_attention(x: Tensor) -> Tensor:
    return causal(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)


def written(x: Tensor) -> Tensor:
    result = x.new_zeros(x.shape)
    result[..., ::2] = x[..., 1::2]
    result[..., 3] += 1
    result[result > 2] = 0
    return result


def indexed_in_place(x: Tensor) -> Tensor:
    """By the operations themselves: which of them an assignment becomes depends on torch's version."""
    aten, result, one, two = torch.ops.aten, x.clone(), torch.tensor([0, 3]), torch.tensor([[5], [7]])
    aten.index_fill_(result, -1, one, 2.0)
    aten.index_put_(result, [None, None, one], x[..., 4:6])
    aten.index_put_(result, [None, None, two], torch.tensor([[1.0], [2.0]]).to(x))
    aten.index_put_(result, [torch.tensor([0]), None, one], x[0, :, 1:3].mT)
    aten.index_put_(result, [x[..., 0] > 0], torch.linspace(0, 1, HIDDEN).to(x))
    aten.index_put_(result, [None, x[0, :, 1] > 0], torch.ones(1, 1, HIDDEN).to(x))
    aten.index_put_(result, [None, None, torch.arange(HIDDEN) == 6], x[..., :1])
    result.index_add_(2, one, x[..., 8:10]).index_copy_(-1, two[0], x[..., 1:2])
    result = torch.select_scatter(torch.slice_scatter(result, x[..., :2], -1, 1, 3), x[..., 9], -1, 9)
    return torch.select_scatter(result, x[1] * 2, 0, 0)


def in_another_order(x: Tensor) -> Tensor:
    """Positions, then rows, in one dim."""
    return x.transpose(0, 1).flatten(0, 1)


def assigned(x: Tensor) -> Tensor:
    result = x.clone()
    result[..., [0, 3]] = 1.0
    result[..., torch.tensor([1, 2])] = x[..., 4:6]
    result[:, :, torch.tensor([5])] += 1
    return result


def written_first(x: Tensor) -> Tensor:
    result = x.clone()
    result[:, torch.tensor([0])] = 1.0
    return result


def experts(x: Tensor, router: nn.Module, weights: Tensor) -> Tensor:
    scores, best = router(x).softmax(-1).topk(2)
    return ((x[:, :, None, None, :] @ weights[best]).squeeze(-2) * scores[..., None]).sum(2)


def in_inference_mode(x: Tensor, module: nn.Module) -> Tensor:
    with torch.inference_mode():
        return module(x).softmax(-1).clone()


def rotated_pairs(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(pairs.abs(), pairs.angle())).flatten(2)


APART: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(HIDDEN, 7),
    "mlp": lambda: nn.ModuleList([nn.LayerNorm(HIDDEN), linear(HIDDEN, 20), nn.GELU(), linear(20, HIDDEN)]),
    "rms norm": lambda: nn.RMSNorm(HIDDEN),
    "selected rows of a table": lambda: Call(
        lambda x, t: x + t.index_select(0, x[0, :, 0].long().clamp(0, 3)), torch.rand(4, 12)
    ),
    "gated": lambda: Call(lambda x, a, b: functional.silu(a(x)) * b(x), linear(12, 20), linear(12, 20)),
    "glu": lambda: Call(lambda x, a: functional.glu(a(x)), linear(12, 24)),
    "chunks": lambda: Call(lambda x: torch.cat(x.chunk(3, -1)[::-1], -1) - torch.stack([x, x], 1).sum(1)),
    "flattened rows": lambda: Call(lambda x, a: a(x.view(-1, HIDDEN)).view(x.shape), linear(12, 12)),
    "length first": lambda: Call(
        lambda x, a: a(x.transpose(0, 1).reshape(-1, HIDDEN)).view(-1, len(x), 12).transpose(0, 1),
        linear(12, 12),
    ),
    "einsum": lambda: Call(lambda x, w: torch.einsum("bld,dhk->bhlk", x, w).mT.permute(0, 3, 1, 2), W),
    "over heads": lambda: Call(lambda x: own_attention(x.reshape(-1, 1, HIDDEN)).view(x.shape)),
    "pointwise convolution": lambda: Call(lambda x, c: c(x.mT).mT, nn.Conv1d(12, 6, 1)),
    "convolved features": lambda: Call(
        lambda x, c: c(x[:, None]).transpose(1, 2).flatten(2),
        nn.Conv2d(1, 2, (1, 3), stride=(1, 2), padding=(0, 1)),
    ),
    "groups of each position": lambda: Call(
        lambda x, n: n(x.flatten(0, 1)).view_as(x), nn.GroupNorm(3, HIDDEN)
    ),
    "batch norm in evaluation mode": lambda: Call(lambda x, n: n(x.mT).mT, nn.BatchNorm1d(HIDDEN)).eval(),
    "features sorted": lambda: Call(lambda x: x.sort(-1)[0].cumsum(-1).flip(-1) + x.var(-1, keepdim=True)),
    "normalised": lambda: Call(lambda x: functional.normalize(x, dim=-1).log_softmax(-1).clamp(min=-3)),
    "one hot": lambda: Call(lambda x: functional.one_hot(x.argmax(-1), HIDDEN).to(x.dtype)),
    "triangles": lambda: Call(lambda x: (x[..., None] + x[..., None, :]).tril().sum(-1)),
    "gathered": lambda: Call(lambda x: x.gather(-1, x.argsort(-1)[..., :5])),
    "looked up": lambda: Call(lambda x, t: t(x.argmax(-1)), nn.Embedding(HIDDEN, 7)),
    "in classes": lambda: Call(lambda x, t: torch.bucketize(x, t), torch.linspace(-1, 1, 4)),
    "written in place": lambda: Call(written),
    "indexed in place": lambda: Call(indexed_in_place),
    "features assigned": lambda: Call(assigned),
    "read from a table in order": lambda: Call(lambda x, t: torch.take(t, x.argmax(-1)), torch.rand(HIDDEN)),
    "experts": lambda: Call(experts, linear(12, 4), torch.linspace(0, 1, 4 * 12 * 12).view(4, 12, 12)),
    "rotated pairs": lambda: Call(rotated_pairs),
    "input written to": lambda: nn.ReLU(inplace=True),
    "inference mode": lambda: Call(in_inference_mode, linear(12, 12)),
    "a constant for all": lambda: Call(
        lambda x, p: x + p.expand(len(x), x.shape[1], -1), torch.ones(1, 1, 12)
    ),
    "ones": lambda: Call(lambda x: 1 - x * torch.ones(x.shape[1], 1)),
    "nested": lambda: Call(lambda x: (x, {"ids": x.argmax(-1), "rows": torch.ones(len(x)), "name": "kept"})),
    "where": lambda: Call(lambda x: torch.where(x > 0, x, 0.0).masked_fill(x > 1, 1.0).nan_to_num(nan=0.0)),
}
"""Layers that work on each position by itself."""
W = torch.linspace(-1, 1, 12 * 3 * 4).view(12, 3, 4)
MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (lambda: Call(own_attention), r"aten\.\w+ of scaled_dot_product_attention"),
    "scores": (lambda: Call(lambda x: (x @ x.mT).softmax(-1) @ x), r"aten\.bmm of matmul"),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(HIDDEN, 2, 24, 0.0, batch_first=True),
        r"aten\.\w+ of multi_head_attention_forward",
    ),
    "lstm": (lambda: nn.LSTM(HIDDEN, HIDDEN, batch_first=True), "aten.unbind of lstm"),
    "mean pooled": (lambda: Call(lambda x: x + x.mean(1, keepdim=True)), "aten.mean"),
    "largest of all": (lambda: Call(lambda x: x / x.abs().max()), "aten.max"),
    "class token": (
        lambda: Call(lambda x, c: torch.cat([c.expand(len(x), -1, -1), x], 1), torch.ones(1, 1, 12)),
        "aten.cat",
    ),
    "last token": (lambda: Call(lambda x: x + x[:, -1:]), "aten.slice"),
    "depthwise convolution": (
        lambda: Call(lambda x, c: c(x.mT).mT, nn.Conv1d(12, 12, 3, padding=1, groups=12)),
        "aten.convolution of conv1d",
    ),
    "convolved positions": (
        lambda: Call(lambda x, c: c(x[:, None]).squeeze(1), nn.Conv2d(1, 1, (3, 1), padding=(1, 0))),
        "aten.convolution of conv2d",
    ),
    "shift": (lambda: nn.ZeroPad2d((0, 0, 1, -1)), "aten.constant_pad_nd of pad"),
    "shift by slices": (
        lambda: Call(lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)),
        "aten.slice",
    ),
    "roll": (lambda: Call(lambda x: x.roll(1, 1)), "aten.roll"),
    "flip": (lambda: Call(lambda x: x.flip(1)), "aten.flip"),
    "cumsum": (lambda: Call(lambda x: x.cumsum(1)), "aten.cumsum"),
    "softmax": (lambda: Call(lambda x: x.softmax(1)), "aten._softmax of softmax"),
    "norm": (lambda: Call(lambda x: functional.normalize(x, dim=1)), "aten.linalg_vector_norm of normalize"),
    "layer norm": (lambda: Call(lambda x: functional.layer_norm(x, x.shape[1:])), "aten.native_layer_norm"),
    "instance norm": (lambda: Call(lambda x, n: n(x.mT).mT, nn.InstanceNorm1d(12)), "aten.native_batch_norm"),
    "group norm": (lambda: Call(lambda x, n: n(x.mT).mT, nn.GroupNorm(3, 12)), "aten.native_group_norm"),
    "scrambled view": (lambda: Call(lambda x: x.reshape(len(x), 12, -1).mT), "aten.view of reshape"),
    "pairs": (lambda: Call(lambda x: torch.einsum("bld,bmd->blm", x, x).sum(2)), "aten.bmm of einsum"),
    "differences": (lambda: Call(lambda x: (x[:, :, None] - x[:, None]).sum(2)), "aten.sub"),
    "fourier": (lambda: Call(lambda x: torch.fft.fft(x, dim=1).real), "aten._fft_r2c of fft_fft"),
    "windows": (lambda: Call(lambda x: x.unfold(1, 1, 2).squeeze(-1)), "aten.unfold"),
    "sorted": (lambda: Call(lambda x: x.sort(1)[0]), "aten.sort"),
    "gathered": (lambda: Call(lambda x: x.gather(1, x.argsort(1))), "aten.sort of argsort"),
    "gathered first": (lambda: Call(lambda x: x.gather(1, x.long().clamp(0, 0))), "aten.gather"),
    "rows by as many numbers": (
        lambda: Call(lambda x: x[torch.zeros(x.shape[1], dtype=torch.int64)].sum(0)),
        "aten.index",
    ),
    "read by as many numbers": (
        lambda: Call(lambda x: x[:, torch.zeros(x.shape[1], dtype=torch.int64)]),
        "aten.index",
    ),
    "input as table": (lambda: Call(lambda x: functional.embedding(x.argmax(-1), x[0])), "aten.embedding"),
    "written at positions": (lambda: Call(written_first), r"aten\.index_(put|fill)_"),
    "written in another order": (
        lambda: Call(
            lambda x: torch.ops.aten.index_put(
                x.flatten(0, 1), [None, torch.tensor([0])], in_another_order(x)[:, 1:2]
            ).view_as(x)
        ),
        "aten.index_put",
    ),
    "written in another order at a mask": (
        lambda: Call(lambda x: torch.ops.aten.index_put(x, [x[..., 0] < 9], in_another_order(x))),
        "aten.index_put",
    ),
    "copied in another order": (
        lambda: Call(
            lambda x: x.flatten(0, 1).index_copy(1, torch.tensor([0]), in_another_order(x)[:, 1:2]).view_as(x)
        ),
        "aten.index_copy",
    ),
    "filled at positions": (
        lambda: Call(lambda x: x.index_fill(1, torch.tensor([0]), 1.0)),
        "aten.index_fill",
    ),
    "filled at features that positions choose": (
        lambda: Call(lambda x: x.index_fill(2, (99 * x[0, :, 0]).long() % 4, 1.0)),
        "aten.index_fill",
    ),
    "read at features that positions choose": (
        lambda: Call(lambda x: x.index_select(2, x[0, :, 0].long().clamp(0, 3)).sum(2, keepdim=True)),
        "aten.index_select",
    ),
    "copied to a position": (
        lambda: Call(lambda x: x.index_copy(1, torch.tensor([0]), x.new_ones(len(x), 1, 12))),
        "aten.index_copy",
    ),
    "mask": (lambda: Call(lambda x: torch.ones(2 * x.shape[1:2]).tril() @ x), "aten.ones"),
    "weight for each": (
        lambda: Call(lambda x: x[:, :, None].expand(-1, -1, x.shape[1], -1).sum(2)),
        "aten.expand",
    ),
}
"""Layers that mix positions, and where."""
OWN_POSITIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "arange": (lambda: Call(lambda x: x + torch.arange(x.shape[1])[:, None]), "aten.arange"),
    "table": (lambda: Call(lambda x, t: x + t[: x.shape[1]], torch.rand(64, 12)), "aten.slice"),
    "list": (
        lambda: Call(lambda x: x * torch.tensor([*range(x.shape[1])])[:, None]),
        r"aten\.(unsqueeze|lift_fresh of tensor)",
    ),
}
"""Layers that number positions themselves, and where."""
NUMBERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scaled": (lambda: Call(lambda x: x * x.shape[1] ** -0.5), "aten.mul"),
    "added": (lambda: Call(lambda x: x + x.shape[1]), "aten.add"),
    "sized": (lambda: Call(lambda x: x + torch.ones(x.shape[1] - 1).sum()), "aten.ones"),
    "branch": (lambda: Call(lambda x: x.cos() if x.shape[1] > 12 else x), "aten.cos"),
    "filled": (lambda: Call(lambda x: x / torch.full((), x.shape[1])), "aten.full"),
    "tensor": (lambda: Call(lambda x: x / torch.tensor([float(x.shape[1])])), "tensor"),
    "entry": (lambda: Call(lambda x, t: x * t[x.shape[1] - 1], torch.linspace(0, 1, 64)), "aten.select"),
    "part": (
        lambda: Call(lambda x, t: x * t.narrow(0, x.shape[1] - 1, 1), torch.linspace(0, 1, 64)),
        "aten.slice of narrow",
    ),
    "feature": (lambda: Call(lambda x: x * x[..., x.shape[1] % 5, None]), "aten.select"),
    "rolled": (lambda: Call(lambda x: x.roll(x.shape[1] // 2, -1)), "aten.roll"),
    "assigned": (lambda: Call(lambda x: x / torch.ones(1).fill_(x.shape[1])), "aten.fill_"),
    "range": (lambda: Call(lambda x: x * torch.linspace(0, x.shape[1], 3)[1]), "aten.linspace"),
}
"""Layers that compute with the length of the sequence, and where."""


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layer = build()
    return (nn.Sequential(*layer) if isinstance(layer, nn.ModuleList) else layer).double()


def proved(layer: nn.Module, like: Value | None = None) -> Value:
    given = torch.zeros(3, LENGTH, HIDDEN, dtype=torch.float64) if like is None else like
    return prove_positions_apart(NamedLayer("blocks.0", layer), given)


def works_on_parts(layer: nn.Module) -> bool:
    """Whether the layer gives for some positions what it gives at these positions of the whole."""
    torch.manual_seed(1)
    x = torch.randn(3, LENGTH, HIDDEN, dtype=torch.float64)

    def of_part(tensor: Tensor) -> Tensor:
        return tensor[:, PART] if tensor.dim() > 1 else tensor

    try:
        own = layer(of_part(x))
        expected = map_tensors(of_part, layer(x.clone()))
    except (RuntimeError, IndexError):
        return False
    pairs = zip(tensors_of(own), tensors_of(expected), strict=True)
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-12) for a, b in pairs)


def test_layers_that_work_on_each_position_pass() -> None:
    for name, build in APART.items():
        layer = made(build)
        output = proved(copy.deepcopy(layer))
        with torch.no_grad():
            assert works_on_parts(layer), name
        (length,) = {tensor.shape[1] for tensor in tensors_of(output) if tensor.dim() > 1}
        assert length == 13, name
        assert all(tensor.is_meta for tensor in tensors_of(output)), name


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        (
            MIXING,
            r"^layer 'blocks.0' mixes positions of the sequence at {place}.*, which context parallelism "
            r"cuts: use plait.attention, or set plan.cp to 1\.$",
        ),
        (
            OWN_POSITIONS,
            "^layer 'blocks.0' numbers the positions of the sequence by itself at {place}, but with",
        ),
        (NUMBERS, "computes with a number that depends on the length of the sequence at {place}, but"),
    ],
    ids=["mixing", "own positions", "numbers"],
)
def test_layers_that_mix_positions_are_refused_naming_the_place(
    layers: dict[str, tuple[Callable[[], nn.Module], str]], told: str
) -> None:
    for name, (build, place) in layers.items():
        refusal = ""
        try:
            proved(made(build))
        except ModelError as error:
            refusal = str(error)
        assert re.search(told.replace("{place}", place), refusal), name
        with torch.no_grad():
            assert not works_on_parts(made(build)), name


def test_layers_for_one_length_only_are_refused() -> None:
    mixer = Call(lambda x, mix: mix(x.mT).mT, linear(LENGTH, LENGTH)).double()
    with pytest.raises(
        ModelError, match=r"does not run on torch.float64 \[5, 13, 12\] \(with plan.cp above 1,"
    ):
        proved(mixer)


def test_an_unknown_operation_is_refused() -> None:
    bilinear = nn.Bilinear(HIDDEN, HIDDEN, 5).double()
    with pytest.raises(ModelError, match=r"applies aten\._trilinear of bilinear to .* is unknown: use other"):
        proved(Call(lambda x, b: b(x, x), bilinear))
    assert proved(Call(lambda x: x.tanh())).shape == (5, 13, HIDDEN)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (
            lambda x: x.transpose(0, 1),
            r"returns a tensor of shape \[13, 5, 12\] whose dim 1 is not the sequence",
        ),
        (lambda x: x.flatten(0, 1), r"returns a tensor of shape \[65, 12\] whose dim 1 is not the sequence"),
        (lambda x: x.repeat_interleave(2, 1), r"shape \[5, 26, 12\] whose dim 1 is not the sequence"),
        (lambda x: (x, torch.ones(4, 4)), r"shape \[4, 4\] whose dim 1 is not the sequence"),
        (lambda x: torch.ones(x.shape[1]), r"shape \[13\] with positions of the sequence in dim 0"),
    ],
    ids=["transposed", "flattened", "repeated", "without", "no rows"],
)
def test_outputs_have_the_sequence_in_dim_1(output: Callable[[Tensor], Value], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        proved(Call(output))


def test_a_layer_that_catches_the_error_is_refused() -> None:
    def careless(x: Tensor) -> Tensor:
        try:
            return x.cumsum(1)
        except ModelError:
            return x

    with pytest.raises(ModelError, match=r"at aten\.cumsum"):
        proved(Call(careless))


def test_memory_shared_past_autograd_is_followed() -> None:
    assert proved(Call(lambda x: x.data + x.detach())).shape == (5, 13, HIDDEN)
    with pytest.raises(ModelError, match=r"at aten\.mean"):
        proved(Call(lambda x: x + x.data.mean(1, keepdim=True)))


def test_functions_marked_as_mixing_positions_are_accepted() -> None:
    attention = positions_may_mix(2, "query", "key", "value")(causal)
    numbers = gives_positions(lambda length: torch.arange(length))

    def layer(x: Tensor) -> Tensor:
        y = x + numbers(x.shape[1])[:, None]
        return x + attention(heads(y), heads(y), value=heads(y)).transpose(1, 2).flatten(2)

    assert proved(Call(layer)).shape == (5, 13, HIDDEN)
    with pytest.raises(ModelError, match=r"at aten\.cumsum"):
        proved(Call(lambda x: layer(x).cumsum(1)))
    with pytest.raises(
        ModelError, match=r"gives causal as key a tensor of shape \[5, 13, 3, 4\] whose dim 2 is"
    ):
        proved(Call(lambda x: attention(heads(x), heads(x).transpose(1, 2), heads(x))))


def test_what_runs_between_the_two_calls_of_a_marked_pair_is_looked_at() -> None:
    @keeps_positions_later("x")
    def sorted_back(x: Tensor) -> Callable[[], Tensor]:
        ordered, order = x.sort(1)
        return lambda: torch.empty_like(x).scatter(1, order, ordered)

    def layer(x: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
        finish = sorted_back(x=x)
        return between(x) + finish()

    assert proved(Call(lambda x: layer(x, torch.exp))).shape == (5, 13, HIDDEN)
    with pytest.raises(ModelError, match=r"at aten\.cumsum"):
        proved(Call(lambda x: layer(x, lambda y: y.cumsum(1))))
    with pytest.raises(ModelError, match=r"at aten\.cumsum"):
        proved(Call(lambda x: layer(x, torch.exp).cumsum(1)))


def test_dropout_keeps_positions_apart() -> None:
    assert proved(nn.Dropout(0.1)).shape == (5, 13, HIDDEN)
    assert proved(Call(functional.dropout)).shape == (5, 13, HIDDEN)


def test_random_numbers_drawn_for_each_position_keep_positions_apart() -> None:
    draws = Call(lambda x: x.softmax(-1).flatten(0, 1).multinomial(2).view(*x.shape[:2], 2))
    assert proved(draws).shape == (5, 13, 2)
    with pytest.raises(ModelError, match=r"at aten\.multinomial"):
        proved(Call(lambda x: x.sum(-1).softmax(0).multinomial(2)))


def test_inputs_are_nested_and_keep_what_is_no_sequence() -> None:
    like = {
        "x": torch.zeros(2, LENGTH, HIDDEN, dtype=torch.float16),
        "ids": (torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(2), torch.zeros(()), "kept"),
    }
    output = proved(Call(lambda value: value), like)
    assert output["x"].dtype is torch.float16
    assert output["x"].shape == (5, 13, HIDDEN)
    assert [one.shape for one in output["ids"][:3]] == [(1, 13), (5,), ()]
    assert output["ids"][3] == "kept"


def test_the_position_proof_does_not_change_the_layer() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(LENGTH)).double()  # over what it takes for features: the positions
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ModelError):
        proved(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert not any(parameter.is_meta for parameter in layer.parameters())
