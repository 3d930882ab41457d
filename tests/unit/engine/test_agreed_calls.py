"""Which calls of a step ranks compare again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.device import CPU
from plait.engine import runner


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
