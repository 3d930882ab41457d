"""Before the first layer of a step: calls that ranks compare, what goes to the device, new shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.engine import runner
from plait.engine.local_batch import LocalInputs
from plait.ranks.accelerator import CPU


def test_on_nccl_the_latest_calls_that_ranks_agreed_on_are_not_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(runner, "require_same_text", lambda call, *_, **__: compared.append(call))
    where = [CPU]
    group = SimpleNamespace(device_for_text=lambda device: where[0])
    mesh = SimpleNamespace(group=lambda axis: group, device=CPU, uses_nccl=True)
    own: Any = SimpleNamespace(mesh=mesh, _agreed={})

    def compare(*calls: str, axis: str = "pp") -> list[str]:
        compared.clear()
        for call in calls:
            runner.Runner.require_same_call(own, call, axis)
        return list(compared)

    calls = [str(number) for number in range(runner.REMEMBERED_SHAPES)]
    assert compare(*calls, *calls) == calls
    assert compare("one more", *calls[1:], calls[0]) == ["one more", calls[0]]
    assert compare(calls[9], axis="tp") == [calls[9]]
    mesh.uses_nccl = False
    assert compare("on CPUs", "on CPUs") == ["on CPUs"] * 2
    where[0] = torch.device("cuda")
    assert compare("never") == []


@pytest.mark.parametrize("stage", [0, 1])
def test_inputs_go_to_the_device_of_ranks_with_the_first_stage_alone(stage: int) -> None:
    """The ranks of the other stages need their shapes; a device without data stands for a GPU."""
    place = {"pp": stage, "dp": 1 - stage, "tp": 1 - stage, "cp": 1 - stage}
    mesh = SimpleNamespace(index=place.__getitem__, device=torch.device("meta"))
    plan = SimpleNamespace(precision="bf16")
    steps = SimpleNamespace(schedule=SimpleNamespace(rank_of=[0, 1]))
    own: Any = SimpleNamespace(mesh=mesh, plan=plan, steps=steps)
    number, token = runner.Runner.as_input(own, (torch.ones(2), torch.ones(2, dtype=torch.int64)))
    assert (number.dtype, token.dtype) == (torch.bfloat16, torch.int64)
    assert {one.device.type for one in (number, token)} == {"cpu" if stage else "meta"}


def test_layers_run_on_the_meta_device_for_shapes_that_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the step and the latest two others are; a longer document of the same shape is new."""
    monkeypatch.setattr(runner, "REMEMBERED_SHAPES", 2)
    inferred: list[int] = []

    def infer(value: torch.Tensor, input_gradients: bool) -> list[int]:
        inferred.append(len(value))
        return [len(value) + 10 * input_gradients]

    own: Any = SimpleNamespace(_infos={}, _infer=infer)

    def run(*rows: int, longest: int = -1, input_gradients: bool = False) -> list[int]:
        """The numbers of rows of micro-batches for which layers run."""
        inferred.clear()
        sequence: Any = None if longest < 0 else SimpleNamespace(shape="packed", longest=longest)
        batch = LocalInputs([torch.empty(each, 1) for each in rows], [sequence] * len(rows))
        found: Any = runner.Runner._layer_infos(own, batch, input_gradients)
        assert found == [[each + 10 * input_gradients] for each in rows]
        return list(inferred)

    assert run(1, 2, 1, 2) == [1, 2]
    assert run(3, 4) == [3, 4]
    assert run(1) == []
    assert run(2) == [2]  # with 1 alone, only 3 and 4 were left beside it
    assert run(5, 5) == [5]
    assert run(4) == [4]  # with 5 alone, only 1 and 2
    assert run(2) == []
    assert run(2, input_gradients=True) == [2]
    with torch.no_grad():
        assert run(2) == [2]
    assert run(2) == []
    assert [run(2, longest=longest) for longest in (0, 5, 5, 4, 6)] == [[2], [2], [], [], [2]]
