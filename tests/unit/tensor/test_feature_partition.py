from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import PlanError
from plait.plan.layout import Layout, Replicate, Shard
from plait.ranks import Group, Mesh, Traffic
from plait.tensor.parallel.partition import (
    EVEN,
    UNEVEN,
    Partition,
    column_layouts,
    is_sharded,
    local_shard,
    row_layouts,
)

AXES = {"replicate": 1, "shard": 2, "tp": 4}


def test_a_column_is_cut_by_its_outputs() -> None:
    assert column_layouts(8, 6, EVEN, AXES, "up") == {
        "weight": Layout((8, 6), AXES, {"tp": Shard(0)}),
        "bias": Layout((8,), AXES, {"tp": Shard(0)}),
    }


def test_a_row_is_cut_by_its_inputs_and_its_bias_is_whole() -> None:
    assert row_layouts(6, 8, EVEN, AXES, "down") == {
        "weight": Layout((6, 8), AXES, {"tp": Shard(1)}),
        "bias": Layout((6,), AXES),
    }


def test_a_transposed_weight_is_cut_by_its_other_dim() -> None:
    assert column_layouts(8, 6, EVEN, AXES, "up", transposed=True) == {
        "weight": Layout((6, 8), AXES, {"tp": Shard(1)}),
        "bias": Layout((8,), AXES, {"tp": Shard(0)}),
    }
    assert row_layouts(6, 8, EVEN, AXES, "down", transposed=True) == {
        "weight": Layout((8, 6), AXES, {"tp": Shard(0)}),
        "bias": Layout((6,), AXES),
    }


def test_each_block_of_several_linears_in_one_is_cut() -> None:
    cut = Partition(parts=4, blocks=3)
    assert column_layouts(24, 6, cut, AXES, "attn", transposed=True) == {
        "weight": Layout((6, 24), AXES, {"tp": Shard(1, blocks=3)}),
        "bias": Layout((24,), AXES, {"tp": Shard(0, blocks=3)}),
    }
    for features, reason in (
        (25, "25 features are not 3 equal blocks"),
        (18, "6 features are not 4 equal parts"),
    ):
        with pytest.raises(PlanError, match=reason):
            column_layouts(features, 6, cut, AXES, "attn")


@pytest.mark.parametrize(
    ("features", "ranks", "cut", "copies"),
    [
        (12, 1, EVEN, 1),
        (12, 4, EVEN, 1),
        (12, 4, Partition(parts=4), 1),
        (12, 2, Partition(parts=4), 1),
        (12, 4, Partition(parts=2, repeated=True), 2),
        (12, 4, Partition(parts=1, repeated=True), 4),
        (12, 4, Partition(parts=4, repeated=True), 1),
        (12, 6, Partition(parts=3, repeated=True), 2),
        (13, 4, UNEVEN, 1),
        (4, 4, UNEVEN, 1),
    ],
)
def test_shards_fewer_than_ranks_are_replicated_in_whole_parts(
    features: int, ranks: int, cut: Partition, copies: int
) -> None:
    layout = column_layouts(features, 3, cut, {"tp": ranks}, "keys")["weight"]
    assert layout.placements == (Shard(0, copies),)
    held = [layout.box((rank,)) for rank in range(ranks)]
    assert all(box.sizes[0] > 0 for box in held)
    if cut.parts is not None:
        part = features // cut.parts
        assert all(box.offsets[0] % part == 0 and box.sizes[0] % part == 0 for box in held)


@pytest.mark.parametrize(
    ("features", "ranks", "cut", "reason"),
    [
        (10, 4, EVEN, "its 10 features do not divide into 4; set tp to 1 or 2"),
        (7, 4, EVEN, "its 7 features do not divide into 4; set tp to 1"),
        (12, 4, Partition(parts=6), r"its 6 parts \(heads\) do not divide into 4; set tp to 1 or 2 or 3"),
        (12, 4, Partition(parts=2), r"its 2 parts \(heads\) do not divide into 4; set tp to 1 or 2"),
        (
            12,
            4,
            Partition(parts=3, repeated=True),
            r"its 3 parts \(heads\) do not divide into 4; set tp to 1 or 3",
        ),
        (
            12,
            8,
            Partition(parts=3, repeated=True),
            r"its 3 parts \(heads\) do not .* set tp to 1 or 3 or 6",
        ),
        (3, 4, UNEVEN, "its 3 features do not divide into 4; set tp to 1 or 2 or 3"),
        (10, 2, Partition(parts=4), r"its 10 features are not 4 equal parts \(heads\)"),
        (10, 1, Partition(parts=4), r"its 10 features are not 4 equal parts \(heads\)"),
        (10, 2, Partition(parts=0), r"its 10 features are not 0 equal parts \(heads\)"),
        (10, 2, Partition(parts=-2), "its 10 features are not -2 equal parts"),
    ],
)
def test_a_partition_that_would_divide_a_head_is_refused(
    features: int, ranks: int, cut: Partition, reason: str
) -> None:
    start = (
        rf"^blocks\.0\.up with a weight of shape \[{features}, 3\] cannot be partitioned over tp = {ranks}: "
    )
    with pytest.raises(PlanError, match=start + reason):
        column_layouts(features, 3, cut, {"tp": ranks}, "blocks.0.up")


def test_every_degree_that_a_refusal_names_would_do() -> None:
    for features in range(1, 13):
        for parts in (None, *(n for n in range(1, features + 1) if features % n == 0)):
            for repeated in (False, True):
                check_advice(features, Partition(parts, repeated))


def check_advice(features: int, cut: Partition) -> None:
    fits = {ranks: cuts(features, cut, ranks) for ranks in range(1, 9)}
    for ranks, advice in fits.items():
        if advice is not None:
            assert advice == [other for other in range(1, ranks) if fits[other] is None]


def cuts(features: int, cut: Partition, ranks: int) -> list[int] | None:
    """None, or the degrees that the refusal advises."""
    try:
        column_layouts(features, 3, cut, {"tp": ranks}, "up")
    except PlanError as refusal:
        advice = str(refusal).partition("set tp to ")[2].partition(",")[0]
        return [int(degree) for degree in advice.split(" or ")]
    return None


def test_a_row_never_repeats_a_part() -> None:
    """Its result is a sum over the ranks, in which the part would count once for each."""
    cut = Partition(parts=2, repeated=True)
    with pytest.raises(PlanError, match=r"2 parts \(heads\) do not divide into 4; set tp to 1 or 2, or"):
        row_layouts(6, 8, cut, AXES, "down")
    assert row_layouts(6, 8, cut, {"tp": 2}, "down")["weight"].placements == (Shard(1),)


def test_a_layout_is_sharded_only_along_an_axis_with_several_ranks() -> None:
    layouts = row_layouts(6, 8, EVEN, AXES, "down")
    assert is_sharded(layouts["weight"])
    assert not is_sharded(layouts["bias"])
    assert not is_sharded(row_layouts(6, 8, EVEN, {**AXES, "tp": 1}, "down")["weight"])
    assert is_sharded(column_layouts(8, 6, Partition(1, repeated=True), AXES, "keys")["weight"])
    assert not is_sharded(Layout((6,), {"shard": 2, "tp": 2}, {"shard": Shard(0), "tp": Replicate()}))


@pytest.mark.parametrize("trainable", [True, False])
def test_a_shard_is_a_parameter_with_memory_of_its_own(trainable: bool) -> None:
    group = Group("tp", (4, 5, 6), 1, None, Traffic(), 1.0)
    full = nn.Parameter(torch.arange(12.0).view(6, 2), trainable)
    part = local_shard(full, Layout((6, 2), {"tp": 3}, {"tp": Shard(0)}), group)
    assert isinstance(part, nn.Parameter)
    assert part.requires_grad == trainable
    assert torch.equal(part, full[2:4])
    assert part.data_ptr() != full[2:4].data_ptr()


def test_one_rank_holds_all_features() -> None:
    full = nn.Parameter(torch.arange(12.0).view(6, 2))
    part = local_shard(full, Layout((6, 2), {"tp": 1}, {"tp": Shard(0)}), Mesh().group("tp"))
    assert torch.equal(part, full)
