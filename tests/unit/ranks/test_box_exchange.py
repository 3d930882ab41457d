"""Transfers between layouts, carried out by all-to-alls of packed boxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.plan.layout.layout import Flat, Layout, Placement, Shard
from plait.plan.layout.routes import BoxRouter, BoxTransfer, boxes_by_rank
from plait.plan.layout.shards import shard, shard_boxes
from plait.ranks import Count, Mesh
from plait.ranks.box_exchange import LocalBoxes, exchange_boxes

AXES = {"all": 4}
LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "rows": (Shard(0), Shard(1, blocks=3)),
    "flat": (Flat((0, 5, 5, 31, 42)), Shard(0, copies=2)),
}


def layout_of(placement: Placement) -> Layout:
    return Layout((7, 6), AXES, {"all": placement})


def routed() -> list[BoxTransfer]:
    router, found = BoxRouter(), []
    places = [(rank, {"all": rank}) for rank in range(4)]
    for name, both in LAYOUTS.items():
        held, needed = (boxes_by_rank(layout_of(placement), places) for placement in both)
        found += router.transfers(name, held, needed, itemsize=8)
    return found


def value_of(name: str) -> Tensor:
    return torch.arange(42.0, dtype=torch.float64).view(7, 6) + 100 * len(name)


def exchanged(most: int | None) -> tuple[bool, Any]:
    """Whether all targets have their values, in float32 from float64, and the traffic."""
    mesh = Mesh(dp=4)
    group, where = mesh.group("dp"), {"all": mesh.rank}
    sources, targets = dict[str, LocalBoxes](), dict[str, LocalBoxes]()
    for name, both in LAYOUTS.items():
        before, after = map(layout_of, both)
        sources[name] = LocalBoxes(shard(value_of(name), before, where), shard_boxes(before, where))
        empty = torch.full(after.local_shape(where), torch.nan)
        targets[name] = LocalBoxes(empty, shard_boxes(after, where))
    exchange_boxes(routed(), sources, targets, group, torch.float64, torch.device("cpu"), most=most)
    wanted = {name: shard(value_of(name), layout_of(both[1]), where) for name, both in LAYOUTS.items()}
    same = all(torch.equal(targets[name].tensor, one.float()) for name, one in wanted.items())
    return same, mesh.traffic.snapshot()["dp"]


@pytest.mark.parametrize("most", [None, 12])
def test_boxes_arrive_where_the_other_layout_has_them_and_are_counted_once(
    thread_ranks: Any, most: int | None
) -> None:
    sent = [
        8 * sum(one.box.numel for one in routed() if one.sender == r and not one.is_local) for r in range(4)
    ]
    assert sum(sent) > 0
    for rank, (same, traffic) in enumerate(thread_ranks.run(exchanged, most, ranks=4)):
        assert same
        assert traffic.keys() == {"all_to_all"}
        assert traffic["all_to_all"].bytes == sent[rank]
        assert (
            traffic["all_to_all"] == Count(1, sent[rank]) if most is None else traffic["all_to_all"].calls > 4
        )


def test_a_whole_tensor_is_one_box() -> None:
    whole = LocalBoxes.whole(value_of("rows"))
    part = shard_boxes(layout_of(Shard(0)), {"all": 2})[0].box
    assert torch.equal(whole.view_of(part), value_of("rows")[part.slices])
