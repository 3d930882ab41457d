"""Ranks get what they want of rank 0's recording, bit by bit; and an error of rank 0 is everyone's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from verification_cases import CLASSES, ROWS, rows_and_classes

from plait.errors import ModelError, PlaitError
from plait.models.layers.layer_sequence import bits_of
from plait.plan.plan import Plan
from plait.ranks import collectives
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.reference.recording import ReferenceRecording, broadcast_object, distribute_recording
from plait.verification.step_location import WHOLE_STEP, RecordKey, RecordScope

TENSORS: dict[str, Tensor] = {
    "double": torch.linspace(0, 1, 7, dtype=torch.float64),
    "bits": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64),
    "narrow": torch.linspace(-2, 2, 6).view(2, 3).bfloat16(),
    "half": torch.ones(3, dtype=torch.float16),
    "whole": torch.tensor([[2**62 + 1, -1]]),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "turned": torch.arange(6.0).view(2, 3).t(),
}


def recording_of(tensors: dict[str, Tensor], scopes: int) -> ReferenceRecording:
    recording = ReferenceRecording()
    for number in range(scopes):
        scope = RecordScope(0, WHOLE_STEP if number == 0 else number - 1)
        recording.add(scope, {RecordKey("value", name=name): value for name, value in tensors.items()})
        recording.widen(scope, {RecordKey("value", name=name): value for name, value in tensors.items()})
    return recording


def shared(own: dict[int, list[str]], tensors: dict[str, Tensor]) -> dict[RecordScope, dict[str, Any]]:
    """What a rank that wants the names in `own[rank]` of micro-batch `rank` and of the whole gets."""
    mesh = Mesh(Plan(dp=4))
    recording = recording_of(tensors, 5) if mesh.rank == 0 else None

    def wanted(scope: RecordScope, key: RecordKey) -> bool:
        return scope.microbatch in (WHOLE_STEP, mesh.rank) and key.name in own[mesh.rank]

    got = distribute_recording(recording, mesh, wanted)
    mesh.close()
    assert all(got.tolerances[scope].keys() == values.keys() for scope, values in got.values.items())
    return {
        scope: {
            key.name: (bits_of(value), value.dtype, tuple(value.shape), str(got.tolerances[scope][key]))
            for key, value in values.items()
        }
        for scope, values in got.values.items()
    }


def test_each_rank_gets_the_recorded_tensors_it_asks_for(thread_ranks: RankPool) -> None:
    own = {0: [], 1: list(TENSORS), 2: ["narrow", "scalar"], 3: []}
    with patch.object(collectives, "require_same_text") as checks:
        results = thread_ranks.run(shared, own, TENSORS, ranks=4)
    assert not checks.called, "a call that all ranks make alike was checked, by a gather of its own"
    whole = results[0]
    assert list(whole) == [RecordScope(0, number) for number in (WHOLE_STEP, 0, 1, 2, 3)]
    assert all(list(entries) == list(TENSORS) for entries in whole.values())
    for name, tensor in TENSORS.items():
        bits, dtype, shape, _ = whole[RecordScope(0, 1)][name]
        assert (bits, dtype, shape) == (bits_of(tensor), tensor.dtype, tuple(tensor.shape))
    for rank in (1, 2, 3):
        assert list(results[rank]) == list(whole)  # so that it knows how many micro-batches there are
        for scope, entries in results[rank].items():
            names = own[rank] if scope.microbatch in (WHOLE_STEP, rank) else []
            assert entries == {name: whole[scope][name] for name in TENSORS if name in names}


def test_boolean_masks_of_a_recording_are_distributed(thread_ranks: RankPool) -> None:
    mask = {"mask": torch.tensor([True, False, True])}
    _, got, *_ = thread_ranks.run(shared, {rank: ["mask"] for rank in range(4)}, mask, ranks=4)
    assert got[RecordScope(0, 1)]["mask"][:3] == (bits_of(mask["mask"]), torch.bool, (3,))


def test_on_one_rank_the_recording_is_not_distributed() -> None:
    recording = recording_of(TENSORS, 2)
    assert distribute_recording(recording, Mesh(), lambda scope, key: False) is recording
    assert broadcast_object("anything", Mesh()) == "anything"


class Exponential(nn.Module):
    """Not in the table of stand-ins of exact mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def told(case: Case, plan: Plan) -> str:
    try:
        verify_rank(case, plan)
    except ModelError as error:
        return str(error)
    return "nothing"


def test_an_error_of_rank_0_is_raised_on_all_ranks(thread_ranks: RankPool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), Exponential(), nn.Linear(4, CLASSES))
    case = Case(model, cross_entropy, [rows_and_classes()], VerifyOptions(mode="exact", steps=1))
    said = thread_ranks.run(told, case, Plan(pp=2, microbatches=2), ranks=2)
    assert len(set(said)) == 1
    assert said[0].startswith("the reference's output of layer 1 holds ")
    assert "mode float64" in said[0]


class Shy(nn.Module):
    """Refuses real data, but not the tensors without values that woven layers are tried with."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == ROWS // 2 and not x.is_meta:
            raise ValueError("no such rows")
        return x


def test_a_model_that_fails_on_one_rank_is_reported_in_one_sentence(thread_ranks: RankPool) -> None:
    model = nn.Sequential(nn.Linear(6, CLASSES), Shy())
    case = Case(model, cross_entropy, [rows_and_classes()], VerifyOptions(steps=1))
    with pytest.raises(PlaitError, match="1 fails on a single device, ValueError: no such rows"):
        thread_ranks.run(verify_rank, case, Plan(pp=2, microbatches=2), ranks=2)
