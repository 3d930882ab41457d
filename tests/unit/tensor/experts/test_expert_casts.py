"""Experts in float8: what is cast, how often, and where a call is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ModelError
from plait.ranks.group import alone
from plait.tensor.experts import expert_casts
from plait.tensor.experts.expert_casts import ExpertCasts
from plait.tensor.experts.experts import Experts
from plait.tensor.float8.cast import ScaledMatrix

TOKENS, HIDDEN, INNER, EXPERTS = 12, 32, 16, 4


def experts_in_float8(**options: Any) -> tuple[Experts, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """Experts, and the operands that they cast: of which matrix, the shapes of scales and data."""
    torch.manual_seed(0)
    module, found = Experts(HIDDEN, INNER, EXPERTS, **options).bfloat16(), list[Any]()
    module.casts = ExpertCasts.over(alone("etp"))

    def noting(name: str) -> Any:
        def note(operand: str, _: Tensor, cast: ScaledMatrix) -> None:
            found.append((f"{operand} of {name}", tuple(cast.scale.shape), tuple(cast.data.shape)))

        return note

    module.casts.gate_up.note, module.casts.down.note = noting("gate_up"), noting("down")
    return module, found


def call(module: Experts, hidden: Tensor | None = None) -> Tensor:
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_() if hidden is None else hidden
    indices = torch.arange(2 * TOKENS).view(TOKENS, 2) % EXPERTS
    return module(hidden, indices, torch.full((TOKENS, 2), 0.5).bfloat16())  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"transposed": True, "weights_first": True, "bias": True}])
def test_rows_have_a_scale_each_and_matrices_one_for_each_output_or_one(options: dict[str, Any]) -> None:
    module, found = experts_in_float8(**options)
    call(module).sum().backward()
    rows, out_of = (
        2 * TOKENS,
        (EXPERTS, 2 * INNER, HIDDEN),
    )
    into = EXPERTS, HIDDEN, INNER
    assert found == [
        ("input of gate_up", (rows, 1), (rows, HIDDEN)),
        ("weight of gate_up", (EXPERTS, 2 * INNER, 1), out_of),
        ("input of down", (rows, 1), (rows, INNER)),
        ("weight of down", (EXPERTS, HIDDEN, 1), into),
        ("gradient of down", (rows, 1), (rows, HIDDEN)),
        ("weight_for_input of down", (EXPERTS, 1, 1), into),
        ("gradient of gate_up", (rows, 1), (rows, 2 * INNER)),
        ("weight_for_input of gate_up", (EXPERTS, 1, 1), out_of),
    ]


def cast_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is cast from now on."""
    shapes, original = list[tuple[int, ...]](), expert_casts.cast_by

    def cast_by(matrix: Tensor, *how: Any) -> ScaledMatrix:
        shapes.append(tuple(matrix.shape))
        return original(matrix, *how)

    monkeypatch.setattr(expert_casts, "cast_by", cast_by)
    return shapes


def test_tokens_are_cast_once_however_many_experts_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = experts_in_float8()
    shapes = cast_shapes(monkeypatch)
    call(module).sum().backward()
    of_rows = [shape for shape in shapes if len(shape) == 2]
    assert of_rows == [(TOKENS, HIDDEN), (2 * TOKENS, INNER), (TOKENS, HIDDEN), (2 * TOKENS, 2 * INNER)]


def test_factors_of_weights_are_found_once_a_step() -> None:
    module, _ = experts_in_float8()
    assert module.casts is not None
    with torch.no_grad():
        hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
        before = call(module, hidden)
        for weight in module.parameters():
            weight *= 2.0**-9  # whose values, by the factors of before, are too small for float8
        assert not torch.equal(call(module, hidden), before * 2.0**-18)
        module.casts.gate_up.begin_step()
        module.casts.down.begin_step()
        assert module.casts.gate_up.nbytes == 0
        call(module, hidden)
    assert module.casts.gate_up.nbytes == 4 * EXPERTS * 2 * INNER
    assert module.casts.down.nbytes == 4 * EXPERTS * HIDDEN


@pytest.mark.parametrize("in_float8", [False, True])
def test_experts_refuse_tokens_of_another_dtype_than_their_matrices(in_float8: bool) -> None:
    module, _ = experts_in_float8()
    if not in_float8:
        module.casts = None
    with pytest.raises(
        ModelError, match="4 experts with matrices in bfloat16 are given tokens in float32: cast"
    ):
        call(module, torch.randn(TOKENS, HIDDEN))


@pytest.mark.parametrize("options", [{}, {"transposed": True}])
def test_kept_casts_of_weights_are_made_once_a_step_in_the_same_memory(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And outputs and gradients have the bits of weights that are cast in each call."""
    (module, _), (other, _) = experts_in_float8(**options), experts_in_float8(**options)
    module.casts = casts = ExpertCasts.over(alone("etp"), keeps_weights=True)
    hidden, counts, places = torch.randn(TOKENS, HIDDEN).bfloat16(), list[int](), set[int]()
    shapes = cast_shapes(monkeypatch)
    for _ in range(2):  # steps, of two micro-batches
        for _ in range(2):
            shapes.clear()
            kept = output_and_gradient(module, hidden)
            counts.append(sum(len(shape) == 3 for shape in shapes))
            assert all(map(torch.equal, kept, output_and_gradient(other, hidden)))
        places |= {one.data_ptr() for one in (*casts.gate_up._memory.values(), *casts.down._memory.values())}
        with torch.no_grad():
            for parameter in (*module.parameters(), *other.parameters()):
                parameter *= 1.25
        for one in (casts.gate_up, casts.down, other.casts.gate_up, other.casts.down):  # type: ignore[union-attr]
            one.begin_step()
    assert counts == [4, 0, 4, 0]
    assert len(places) == 4
    assert casts.down.nbytes == 2 * EXPERTS * HIDDEN * INNER  # scales are forgotten


def output_and_gradient(module: Experts, hidden: Tensor) -> tuple[Tensor, Tensor]:
    given = hidden.clone().requires_grad_()
    output = call(module, given)
    output.float().square().sum().backward()
    assert given.grad is not None
    return output.detach(), given.grad


def test_experts_in_float8_are_refused_within_autocast() -> None:
    module, _ = experts_in_float8()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            ModelError, match=r"4 experts multiply in float8, by plan.linears, and are called within"
        ),
    ):
        call(module)
