"""On GPUs ranks compare a call once, and remember so many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.engine import runner
from plait.engine.runner import REMEMBERED_SHAPES, Runner


def test_calls_that_ranks_agreed_on_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(runner, "require_same_text", lambda call, *_, **__: compared.append(call))
    group = SimpleNamespace(device_for_text=lambda device: torch.device("cpu"))
    mesh = SimpleNamespace(group=lambda axis: group, device=torch.device("cuda"), uses_nccl=True)
    one: Any = SimpleNamespace(mesh=mesh, _agreed={})
    calls = [str(number) for number in range(REMEMBERED_SHAPES)]
    for call in (*calls, *calls):
        Runner.require_same_call(one, call, "pp")
    assert compared == calls
    for axis, call in (("tp", "0"), ("pp", "1"), ("pp", "0"), ("tp", "0")):
        Runner.require_same_call(one, call, axis)
    assert compared == [*calls, "0", "0"], "over another axis; and the oldest of one too many"
    assert len(one._agreed) == REMEMBERED_SHAPES
    mesh.uses_nccl = False
    Runner.require_same_call(one, "new", "pp")
    Runner.require_same_call(one, "new", "pp")
    assert compared[-2:] == ["new", "new"]
