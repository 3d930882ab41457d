"""The options of NCCL's process groups, without NCCL: its classes and torch's helper are stand-ins."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait.ranks import mesh
from plait.ranks.transport import torch_distributed


class Options:
    def __init__(self) -> None:
        self.config, self._timeout = SimpleNamespace(max_ctas=None), None


def test_thread_blocks_of_nccl_kernels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch_distributed, "backends_of", lambda group: "cpu:gloo,cuda:nccl")
    bounded = torch_distributed._nccl_options(8, timedelta(seconds=5))
    assert (bounded.config.max_ctas, bounded._timeout) == (8, timedelta(seconds=5))
    assert torch_distributed._nccl_options(None, timedelta(seconds=5)) is None
    monkeypatch.setattr(torch_distributed, "backends_of", lambda group: "cpu:gloo")
    assert torch_distributed._nccl_options(8, timedelta(seconds=5)) is None


def test_a_renamed_torch_function_is_called_by_the_name_that_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, Any]] = []
    names = ("set_timeout", "_set_default_timeout")
    for present in (names, names[1:]):
        backend = {name: lambda limit, name=name: calls.append((name, limit)) for name in present}
        group: Any = SimpleNamespace(_get_backend=lambda device, backend=backend: SimpleNamespace(**backend))
        torch_distributed.set_timeout(group, torch.device("cpu"), 2.5)
    assert calls == [(name, timedelta(seconds=2.5)) for name in names]
    newer, older = (lambda: None), (lambda: None)
    monkeypatch.setattr(dist, "all_gather_single", newer, raising=False)
    assert torch_distributed._single("all_gather_single", older) is newer
    assert torch_distributed._single("no_such_function", older) is older


def test_only_point_to_point_communicators_have_bounded_thread_blocks(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An all-reduce is never posted before its data is there: it may have all blocks."""
    asked: dict[str, set[int | None]] = {}
    connect = plait.Mesh._make_group

    def make_group(self: plait.Mesh, groups: Any, name: str, max_ctas: int | None = None) -> Any:
        asked.setdefault(name, set()).add(max_ctas)
        return connect(self, groups, name, max_ctas)

    def channels() -> None:
        plait.Mesh(pp=2, tp=2).channel_groups([(0, 1, "F"), (1, 0, "I")])

    monkeypatch.setattr(plait.Mesh, "_make_group", make_group)
    thread_ranks.run(channels, ranks=4)
    assert asked.pop("pp") == {None, mesh.CHANNEL_CTAS}
    assert set().union(*asked.values()) == {None}
