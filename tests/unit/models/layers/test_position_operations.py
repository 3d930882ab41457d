"""The rules of operations, by random programs: what they accept does keep positions apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product as product_of
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from parity.pairs import in_quick
from plait.errors import ModelError
from plait.proof.position_dims import PositionDim
from plait.proof.position_proof import PositionTracker, arguments_of, tracking
from plait.proof.position_rules import RULES, UNIFORM

ROWS, LENGTH, HIDDEN = 3, 5, 4
Step = Callable[[Tensor, int, int], Tensor]
"""A step of a program: of a tensor and two random numbers."""


def dim_of(x: Tensor, number: int) -> int:
    return number % x.dim()


def flattened(x: Tensor, a: int, b: int) -> Tensor:
    first, last = sorted((dim_of(x, a), dim_of(x, b)))
    return x.flatten(first, last)


def split_in_two(x: Tensor, a: int, b: int) -> Tensor:
    size = x.shape[dim_of(x, a)]
    divisors = [one for one in range(1, size + 1) if size % one == 0]
    return x.unflatten(dim_of(x, a), (divisors[b % len(divisors)], -1))


def product(x: Tensor, a: int, b: int) -> Tensor:
    """Of matrices from `x` itself: over its last dim, or over another one."""
    last = x.movedim(dim_of(x, a), -1)
    return last @ last.mT if b % 2 else last @ torch.ones(last.shape[-1], 2)


def written(x: Tensor, a: int, b: int) -> Tensor:
    result = torch.zeros_like(x) if a % 2 else torch.zeros(x.shape, dtype=x.dtype)
    result.select(dim_of(x, a), b % x.shape[dim_of(x, a)]).copy_(x.select(dim_of(x, a), 0))
    return result + x


def indexed_in_place(x: Tensor, a: int, b: int) -> Tensor:
    """By the operations themselves: which of them an assignment becomes depends on torch's version."""
    dim, index, result = dim_of(x, a), torch.zeros(1, dtype=torch.int64), x.clone()
    if a < x.dim():
        part = x.narrow(dim, x.shape[dim] - 1, 1)
        return result.index_copy_(dim, index, part) if b % 2 else result.index_add_(dim, index, part)
    return torch.ops.aten.index_fill_(result, dim, index, 2.0 if b % 2 else torch.tensor(2.0))


def assigned(x: Tensor, a: int, b: int) -> Tensor:
    """At numbers of one dim, or at a mask of the first dims, of other elements of `x` or of constants."""
    dim, result = dim_of(x, a), x.clone()
    index = torch.tensor([0]) if b % 2 else torch.arange(x.shape[dim]) < 1
    values = x.narrow(dim, x.shape[dim] - 1, 1) if a < x.dim() else torch.full((1,), 2.0)
    torch.ops.aten.index_put_(result, [*[None] * dim, index], values)
    return result


def assigned_at_mask(x: Tensor, a: int, b: int) -> Tensor:
    over = [range(x.dim())[-1 - one] for one in range(a % x.dim() + b % 2)]
    mask, result = (x.amax(over) if over else x) > 0.5, x.clone()
    torch.ops.aten.index_put_(result, [mask], torch.full((1,), 2.0))
    return result


def replaced(x: Tensor, a: int, b: int) -> Tensor:
    dim = dim_of(x, a)
    if b % 2:
        return torch.select_scatter(x, x.select(dim, -1), dim, 0)
    return torch.slice_scatter(x, x.narrow(dim, x.shape[dim] - 1, 1), dim, 0, 1)


def normalised(x: Tensor, a: int, b: int) -> Tensor:
    return (
        functional.layer_norm(x, x.shape[dim_of(x, a) :])
        if b % 2
        else functional.normalize(x, dim=a % x.dim())
    )


def zeros(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.int64)


def advanced_index(x: Tensor, a: int, b: int) -> Tensor:
    """At numbers of one or two dims, or as many as there are indices of that dim."""
    dim = dim_of(x, a)
    return x[(*[slice(None)] * dim, zeros(2, 1) if b % 2 else zeros(x.shape[dim]))]


TABLE = torch.linspace(-1, 1, 168).view(2, 3, 4, 7)


def classes(x: Tensor) -> Tensor:
    return (x > 0.5).long()


def looked_up(x: Tensor, a: int, b: int) -> Tensor:
    """In a table, behind some of its dims; by two numbers of each element, which may not be neighbours."""
    return TABLE[(*[slice(None)] * (a % 3), classes(x), *[slice(None)] * (b % 2), classes(1 - x))[: 2 + a]]


def convolved(x: Tensor, a: int, b: int) -> Tensor:
    """By a kernel of 1, or of 3 with or without stride, with or without padding."""
    three = x.reshape(len(x), -1, x.shape[-1])
    weight = torch.linspace(-1, 1, 2 * three.shape[1] * (1 + a // 2 * 2)).view(2, three.shape[1], -1)
    return functional.conv1d(three, weight, padding=a % 2, stride=1 + b % 2 * (a // 2))


def product_of_matrices(x: Tensor, a: int, b: int) -> Tensor:
    rows = x.flatten(0, -2)
    return rows @ torch.ones(rows.shape[1], 2) if b % 2 else torch.ones(2, len(rows)) @ rows


def scattered(x: Tensor, a: int, b: int) -> Tensor:
    dim = dim_of(x, a)
    return x.scatter(dim, classes(x).clamp(max=x.shape[dim] - 1), 2.0 if b % 2 else x.flip(0))


STEPS: dict[str, Step] = {
    "transpose": lambda x, a, b: x.transpose(dim_of(x, a), dim_of(x, b)),
    "movedim": lambda x, a, b: x.movedim(dim_of(x, a), dim_of(x, b)),
    "flatten": flattened,
    "unflatten": split_in_two,
    "unsqueeze": lambda x, a, b: x.unsqueeze(a % (x.dim() + 1)),
    "squeeze": lambda x, a, b: x.squeeze(dim_of(x, a)) if b % 2 else x.squeeze(),
    "expand": lambda x, a, b: x.unsqueeze(dim_of(x, a)).expand(
        *(2 if one == dim_of(x, a) else -1 for one in range(x.dim() + 1))
    ),
    "repeat": lambda x, a, b: x.repeat(*(2 if one == dim_of(x, a) else 1 for one in range(x.dim()))),
    "repeat_interleave": lambda x, a, b: x.repeat_interleave(2, dim_of(x, a)),
    "slice": lambda x, a, b: x.narrow(dim_of(x, a), 0, max(1, x.shape[dim_of(x, a)] - b % 2)),
    "select": lambda x, a, b: x.select(dim_of(x, a), 0),
    "sum": lambda x, a, b: x.sum(dim_of(x, a), keepdim=bool(b % 2)),
    "amax": lambda x, a, b: (
        x.amax((dim_of(x, a), dim_of(x, a) - 1), keepdim=bool(b % 2)) if x.dim() > 1 else x
    ),
    "mean of all": lambda x, a, b: x - x.mean(),
    "softmax": lambda x, a, b: x.softmax(dim_of(x, a)),
    "cumsum": lambda x, a, b: x.cumsum(dim_of(x, a)),
    "sort": lambda x, a, b: x.sort(dim_of(x, a))[0],
    "gather": lambda x, a, b: x.gather(dim_of(x, a), x.argsort(dim_of(x, b))[..., :1].clamp(max=0)),
    "flip": lambda x, a, b: x.flip(dim_of(x, a)) + x,
    "roll": lambda x, a, b: x.roll(1, dim_of(x, a)),
    "chunk": lambda x, a, b: x.tensor_split(2, dim_of(x, a))[0],
    "cat": lambda x, a, b: torch.cat([x, x.sin()], dim_of(x, a)),
    "stack": lambda x, a, b: torch.stack([x, x.sin()], a % (x.dim() + 1)),
    "pad": lambda x, a, b: functional.pad(x, (a % 2, 0, b % 2, 0, a // 2, 0)[: 2 * min(3, x.dim())]),
    "unbind": lambda x, a, b: sum(x.unbind(dim_of(x, a)), torch.zeros(())),
    "diagonal": lambda x, a, b: x.diagonal(0, 0, -1) if x.dim() > 1 else x,
    "tril": lambda x, a, b: x.tril() if x.dim() > 1 else x,
    "index": lambda x, a, b: x.index_select(dim_of(x, a), zeros(x.shape[dim_of(x, a)] if b % 2 else 2)),
    "advanced index": advanced_index,
    "looked up": looked_up,
    "at one number": lambda x, a, b: torch.ops.aten.index(x, [*[None] * dim_of(x, a), torch.tensor(0)]),
    "gathered from a table": lambda x, a, b: TABLE.flatten().gather(0, classes(x).flatten()),
    "gathered by number": lambda x, a, b: (
        torch.linspace(-1, 1, 7 * 601).view(7, 601).gather(0, classes(x).flatten(1))
    ),
    "scattered": scattered,
    "filled at numbers": lambda x, a, b: x.index_fill(dim_of(x, a), zeros(x.shape[dim_of(x, b)]), 2.0),
    "viewed as another dtype": lambda x, a, b: x.contiguous().view(torch.float64 if b % 2 else torch.int32),
    "product of matrices": product_of_matrices,
    "t": lambda x, a, b: x.flatten(1).t(),
    "matrix and vector": lambda x, a, b: torch.mv(x.flatten(0, -2), torch.ones(x.shape[-1])),
    "convolution": convolved,
    "difference": lambda x, a, b: x.unsqueeze(dim_of(x, a)) - x.unsqueeze(dim_of(x, a) + b % 2),
    "masked": lambda x, a, b: x.unsqueeze(dim_of(x, a)).masked_fill(
        x.unsqueeze(dim_of(x, a) + b % 2) > 0.5, -1.0
    ),
    "product": product,
    "written": written,
    "indexed in place": indexed_in_place,
    "assigned": assigned,
    "assigned at a mask": assigned_at_mask,
    "replaced": replaced,
    "norm": normalised,
    "linear": lambda x, a, b: functional.linear(x, torch.linspace(-1, 1, 2 * x.shape[-1]).view(2, -1)),
    "attention": lambda x, a, b: functional.scaled_dot_product_attention(*[x.unsqueeze(0)] * 3),
}


def value_of(x: Tensor, program: list[tuple[str, int, int]]) -> Tensor:
    for name, a, b in program:
        x = STEPS[name](x, a, b) if x.dim() and x.numel() < 5000 else x
    return x


LAYOUTS: dict[str, list[tuple[str, int, int]]] = {
    "rows, positions, features": [],
    "positions, rows, features": [("transpose", 0, 1)],
    "rows, features, positions": [("transpose", 1, 2)],
    "rows with positions": [("flatten", 0, 1)],
    "positions with features": [("flatten", 1, 2)],
    "a dim of size 1": [("unsqueeze", 0, 0)],
}
programs = st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 11), st.integers(0, 11)), max_size=5)


def inputs() -> tuple[Tensor, list[Tensor]]:
    """A tensor, and for each position the tensor with other values there."""
    x, other = torch.rand(2, ROWS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0))
    changed = [x.clone() for _ in range(LENGTH)]
    for position, tensor in enumerate(changed):
        tensor[:, position] = other[:, position]
    return x, changed


def found(program: list[tuple[str, int, int]]) -> PositionDim | None:
    """Where the rules say that the positions are after a program. None: a ModelError."""
    x, _ = inputs()
    tracker = PositionTracker("", ROWS, LENGTH)
    tracker.follow(x, PositionDim(1))
    try:
        with tracking(tracker):
            return tracker.of(value_of(x, program))
    except ModelError:
        return None


def candidates(program: list[tuple[str, int, int]]) -> dict[PositionDim, Tensor]:
    """For each way to contain positions in a result: which change with which of the input's."""
    x, others = inputs()
    result = value_of(x, program)
    changes = torch.stack([value_of(other, program) != result for other in others])
    dims = (
        PositionDim(dim, outer, size // outer // LENGTH)
        for dim, size in enumerate(result.shape)
        for outer in range(1, size // LENGTH + 1)
        if size % (outer * LENGTH) == 0
    )
    return {
        at: changes.unflatten(at.dim + 1, (at.outer, LENGTH, at.inner))
        .movedim(at.dim + 2, 1)
        .flatten(2)
        .any(-1)
        for at in dims
    }


EACH = torch.eye(LENGTH, dtype=torch.bool)
"""Each position changes with that of the input."""
REFUSED_THOUGH_APART = {
    *("cat", "gather", "tril", "written", "indexed in place", "assigned", "replaced"),
    *("gathered by number", "scattered", "filled at numbers", "viewed as another dtype"),
}
"""Some programs with these are refused: `[x, y]` along positions, or treating positions by their number."""


@pytest.mark.parametrize(
    "layout",
    in_quick(LAYOUTS, "rows, positions, features", "positions, rows, features", "rows with positions"),
)
def test_each_operation_on_each_layout_is_accepted_only_if_positions_stay_apart(layout: str) -> None:
    for name, a, b in product_of(STEPS, range(4), range(2)):
        program = [*LAYOUTS[layout], (name, a, b)]
        if name == "viewed as another dtype" and b and layout == "rows, features, positions":
            continue  # two positions are one number
        at, changes = found(program), candidates(program)
        if at is not None:
            assert not (changes[at] & ~EACH).any(), program
        elif name not in REFUSED_THOUGH_APART:
            assert not any(torch.equal(one, EACH) for one in changes.values()), program


@given(programs)
def test_random_programs_are_accepted_only_if_positions_stay_apart(
    program: list[tuple[str, int, int]],
) -> None:
    with suppress(RuntimeError, IndexError):  # a step does not fit the shape
        at = found(program)
        assert at is None or not (candidates(program)[at] & ~EACH).any()


@pytest.mark.parametrize(
    "program",
    [
        [("transpose", 1, 2), ("flatten", 0, 1), ("softmax", 1, 0)],
        [("unflatten", 2, 1), ("product", 1, 0)],
        [("flatten", 1, 2), ("roll", 1, 0)],
    ],
    ids=["softmax", "product", "roll"],
)
def test_programs_that_mix_positions_are_refused(program: list[tuple[str, int, int]]) -> None:
    assert found(program) is None


def test_every_position_rule_is_for_an_operation_of_torch() -> None:
    aten = torch.ops.aten
    assert [
        name for name in (*RULES, *UNIFORM) if not hasattr(aten, name) and not hasattr(aten, f"{name}_")
    ] == []


def test_arguments_have_the_names_of_the_schema() -> None:
    x: Any = torch.ones(2, 3)
    assert arguments_of(torch.ops.aten.sum.dim_IntList, (x, [1]), {}) == {
        "self": x,
        "dim": [1],
        "keepdim": False,
        "dtype": None,
    }
    assert arguments_of(torch.ops.aten.softmax.int, (x,), {"dim": 1})["dim"] == 1
