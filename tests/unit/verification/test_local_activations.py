"""Which part of a recorded activation a rank holds: positions over cp, then sequence or classes over tp."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.plan.axes import coordinate_of, sizes_of_plan
from plait.plan.plan import ContextLayout, Plan
from plait.tensor.losses import SequenceLoss, cross_entropy
from plait.verification.candidate.local_activations import ActivationParts
from plait.verification.reference.recording import NO_TOLERANCE, Tolerance
from plait.verification.step_location import RecordKey

OUTPUT = RecordKey("output", 1, "0")
WHOLE = torch.arange(2 * 8 * 3).view(2, 8, 3).double()


def parts_of(plan: Plan, rank: int, *, dim: int | None = None, vocabulary: Any = None) -> ActivationParts:
    """Those of a rank; `dim`: along which tp has parts of the output of layer 1, the last of two."""
    coordinate, sizes = coordinate_of(rank, sizes_of_plan(plan)), sizes_of_plan(plan)
    mesh = SimpleNamespace(index=coordinate.__getitem__, size=sizes.__getitem__)
    dims = [SimpleNamespace(next=None), SimpleNamespace(next=dim)]
    blueprint = SimpleNamespace(plan=plan, output_linear=None, stage_layers=[range(2)], sequence_dims=dims)
    runtime: Any = SimpleNamespace(blueprint=blueprint, mesh=mesh, vocabulary=vocabulary)
    return ActivationParts(runtime)


def of_rank(plan: Plan, rank: int, whole: Tensor = WHOLE, **more: Any) -> Tensor:
    box = parts_of(plan, rank, **more).box(OUTPUT, whole.shape)
    assert box is not None
    assert box.shape == tuple(whole.shape)
    return box.of(whole)


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_a_rank_of_cp_has_its_positions(kind: ContextLayout, positions: list[list[int]]) -> None:
    plan = Plan(cp=2, context_layout=kind)
    for rank, own in enumerate(positions):
        assert torch.equal(of_rank(plan, rank), WHOLE[:, own])
        found = parts_of(plan, rank).positions(8)
        assert found is not None
        assert found.tolist() == own


def test_a_rank_of_tp_has_its_part_of_cps_positions() -> None:
    plan = Plan(cp=2, tp=2)
    for rank, own in enumerate([[0, 1], [6, 7], [2, 3], [4, 5]]):
        assert torch.equal(of_rank(plan, rank, dim=1), WHOLE[:, own])
        parts = parts_of(plan, rank, dim=1)
        assert parts.tp_dim(OUTPUT) is not None
        for other in (OUTPUT._replace(name="1"), OUTPUT._replace(layer=-1), OUTPUT._replace(layer=0)):
            assert parts.tp_dim(other) is None


def test_with_sharded_logits_a_rank_of_tp_has_its_classes() -> None:
    plan = Plan(cp=2, tp=2)
    for rank, (positions, classes) in enumerate([((0, 1, 6, 7), (0, 1)), ((0, 1, 6, 7), (2,))]):
        expected = WHOLE[:, list(positions)][..., list(classes)]
        assert torch.equal(of_rank(plan, rank, vocabulary=object()), expected)


@pytest.mark.parametrize(("plan", "shape"), [(Plan(), (2, 8, 3)), (Plan(cp=2), (2,)), (Plan(tp=2), (2, 8))])
def test_activations_without_a_split_dim_are_whole_on_every_rank(plan: Plan, shape: tuple[int, ...]) -> None:
    parts = parts_of(plan, 0)
    assert parts.box(OUTPUT, shape) is None
    assert parts.tp_dim(OUTPUT) is None
    assert parts.positions(8) is None or plan.cp > 1


def test_short_sequences_leave_ranks_without_a_position() -> None:
    sizes = [of_rank(Plan(cp=4), rank, WHOLE[:, :3]).shape[1] for rank in range(4)]
    assert sum(sizes) == 3
    assert 0 in sizes


LOGITS = torch.randn(2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(5, (2, 8), generator=torch.Generator().manual_seed(2))
TOTAL = cross_entropy.total(LOGITS.clone(), TARGETS)


@pytest.mark.parametrize("cp", [2, 3])
def test_the_summands_of_a_loss_add_up_and_are_those_of_the_parts(cp: int) -> None:
    summands = []
    for rank in range(cp):
        parts = parts_of(Plan(cp=cp), rank)
        own, tolerance = parts.total(cross_entropy, LOGITS, TARGETS, TOTAL, Tolerance(1.0, 1e-13))
        expected = cross_entropy.total(parts.of_cp(LOGITS), parts.of_cp(TARGETS))
        assert 1e-13 < tolerance.allowed < 1e-12
        assert float((own - expected).abs()) <= tolerance.allowed
        summands.append(own)
    torch.testing.assert_close(torch.stack(summands).sum(), TOTAL, rtol=1e-14, atol=0.0)


class LargestOfASequence:
    """A loss that is no sum over positions."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return output.amax((1, 2)).sum()

    def weight(self, targets: Tensor) -> int:
        return len(targets)


def test_a_loss_that_is_no_sum_differs_on_every_rank() -> None:
    loss: Any = LargestOfASequence()
    recorded = loss.total(LOGITS, TARGETS)
    for rank in range(2):
        parts = parts_of(Plan(cp=2), rank)
        own, tolerance = parts.total(loss, LOGITS, TARGETS, recorded, Tolerance(1.0, 1e-13))
        assert abs(float(own - loss.total(parts.of_cp(LOGITS), TARGETS))) > tolerance.allowed


def test_a_loss_of_whole_sequences_is_that_of_one_rank() -> None:
    class OfSequences(SequenceLoss):
        def __init__(self) -> None:
            pass

    bound = Tolerance(1.0, 1e-13)
    for rank, expected in ((0, TOTAL), (1, 0 * TOTAL)):
        own, tolerance = parts_of(Plan(cp=2), rank).total(OfSequences(), LOGITS, TARGETS, TOTAL, bound)
        assert (float(own), own.dtype, tolerance) == (float(expected), TOTAL.dtype, bound)


def test_a_loss_in_exact_mode_has_no_tolerance() -> None:
    parts = parts_of(Plan(cp=2), 0)
    _, tolerance = parts.total(cross_entropy, LOGITS, TARGETS, TOTAL, NO_TOLERANCE)
    assert tolerance == NO_TOLERANCE
    assert parts_of(Plan(), 0).total(cross_entropy, LOGITS, TARGETS, TOTAL, NO_TOLERANCE)[0] is TOTAL


def test_labels_shifted_after_cutting_the_sequence_are_recognised() -> None:
    tokens = torch.arange(10).view(1, 10)
    (named,) = parts_of(Plan(cp=2), 0).targets_shifted_late(tokens[:, 1:9])
    assert named[1][:, :-1].tolist() == [[1, 6, 7]]  # next tokens of 0, 1, 6 in 0 1 6 7
    assert parts_of(Plan(), 0).targets_shifted_late(tokens) == []
    assert parts_of(Plan(cp=2), 0).targets_shifted_late({"a": tokens}) == []


@pytest.mark.parametrize("rank", range(4))
def test_tokens_of_a_rank_are_its_positions_or_its_part_of_them_along_tp(rank: int) -> None:
    plan = Plan(cp=2, tp=2, context_layout="contiguous")
    own = WHOLE[:, 4 * (rank // 2) : 4 * (rank // 2) + 4]
    parts = parts_of(plan, rank)
    assert torch.equal(parts.of_tokens(WHOLE.shape, 8).of(WHOLE), own.flatten(0, 1))
    half = own[:, 2 * (rank % 2) : 2 * (rank % 2) + 2]
    assert torch.equal(parts.of_tokens(WHOLE.shape, 4).of(WHOLE), half.flatten(0, 1))
    assert torch.equal(parts.of_tokens((16, 3), 16).of(WHOLE.flatten(0, 1)), WHOLE.flatten(0, 1))
