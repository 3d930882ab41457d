"""All collectives in groups smaller than the world, whose ranks neither begin at 0 nor stand in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.ranks import (
    Group,
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_uneven,
    barrier,
    broadcast,
    gather,
    receive,
    reduce,
    reduce_scatter,
    scatter,
    send,
)

WORLD = 7
GROUPS = ((4, 1, 6), (5, 0, 3, 2))
ROWS = 12
"""Of what a rank hands in: ranges of both sizes of group."""
Op = Any
OPS: dict[Op, Any] = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.mean(0),
    "product": lambda stack: stack.prod(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
}


def value(rank: int, rows: int = ROWS) -> Tensor:
    """Whole numbers, so that sums and products are exact."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(1, 9, (rows, 2), generator=generator).to(torch.float64)


def rooted(group: Group, root: int) -> dict[str, Tensor | None]:
    """The collectives that have a source or a destination, at index `root`."""
    mine = value(group.rank)
    ranges = value(group.rank, ROWS * group.size) if group.index == root else None
    reduced = {f"reduce {op}": reduce(mine.clone(), group, op, destination=root).wait() for op in OPS}
    if group.index != root:
        reduced = dict.fromkeys(reduced)  # what the others hold is undefined
    return {
        "broadcast": broadcast(mine.clone(), group, root).wait(),
        "gather": gather(mine, group, root).wait(),
        "gather out": gather(mine, group, root, out=torch.empty_like(whole_of(group))).wait(),
        "scatter": scatter(ranges, group, root, out=torch.empty_like(mine)).wait(),
        **reduced,
    }


def whole_of(group: Group) -> Tensor:
    return torch.cat([value(rank) for rank in group.ranks])


def rootless(group: Group) -> dict[str, Tensor | None]:
    mine = value(group.rank)
    after = (group.index + 1) % group.size
    posted = receive(torch.empty_like(mine), group, group.index - 1 if group.index else group.size - 1)
    sent = send(mine, group, after)
    found: dict[str, Tensor | None] = {"receive": posted.wait()}
    sent.wait()
    barrier(group).wait()
    for op in OPS:
        found[f"all_reduce {op}"] = all_reduce(mine.clone(), group, op).wait()
        found[f"reduce_scatter {op}"] = reduce_scatter(mine, group, op).wait()
    found["all_gather"] = all_gather(mine, group).wait()
    found["all_to_all"] = all_to_all(mine, group).wait()
    sizes = sizes_sent(group.size, group.index)
    received = [sizes_sent(group.size, source)[group.index] for source in range(group.size)]
    flat = mine.view(-1)[: sum(sizes)]
    found["all_to_all_uneven"] = all_to_all_uneven(flat, group, sizes, received).wait()
    return found


def sizes_sent(size: int, index: int) -> list[int]:
    """Elements that a rank sends to each index, of some none."""
    return [(2 * index + other) % 5 for other in range(size)]


def body(messages: bool) -> list[dict[str, Tensor | None]]:
    group = Mesh(dp=WORLD, timeout=20.0).new_group(GROUPS, "some")
    assert group is not None
    group = replace(group, transport=group.transport.over_torch()) if messages else group
    return [rootless(group), *(rooted(group, root) for root in range(group.size))]


def expected_rootless(ranks: tuple[int, ...], index: int) -> dict[str, Tensor | None]:
    stack = torch.stack([value(rank) for rank in ranks])
    ranges = stack.chunk(len(ranks), dim=1)
    found: dict[str, Tensor | None] = {"receive": value(ranks[index - 1])}
    for op, combine in OPS.items():
        found[f"all_reduce {op}"] = combine(stack)
        found[f"reduce_scatter {op}"] = combine(ranges[index])
    uneven = []
    for source, rank in enumerate(ranks):
        sizes = sizes_sent(len(ranks), source)
        uneven.append(value(rank).view(-1)[sum(sizes[:index]) :][: sizes[index]])
    found |= {"all_to_all": ranges[index].flatten(0, 1), "all_to_all_uneven": torch.cat(uneven)}
    return {**found, "all_gather": stack.flatten(0, 1)}


def expected_rooted(ranks: tuple[int, ...], index: int, root: int) -> dict[str, Tensor | None]:
    stack = torch.stack([value(rank) for rank in ranks])
    whole = stack.flatten(0, 1) if index == root else None
    return {
        "broadcast": value(ranks[root]),
        "gather": whole,
        "gather out": whole,
        "scatter": value(ranks[root], ROWS * len(ranks)).chunk(len(ranks))[index],
        **{f"reduce {op}": combine(stack) if index == root else None for op, combine in OPS.items()},
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("messages", [False, True], ids=["shared", "sent"])
def test_collectives_of_groups_smaller_than_the_world_work(rank_pool: Any, messages: bool) -> None:
    """Indices are places in the group; roots, ranges and neighbours follow them, not the global ranks."""
    told = rank_pool.run(body, messages, ranks=WORLD)
    for ranks in GROUPS:
        for index, rank in enumerate(ranks):
            wanted = [expected_rootless(ranks, index)]
            wanted += [expected_rooted(ranks, index, root) for root in range(len(ranks))]
            for got, want in zip(told[rank], wanted, strict=True):
                assert got.keys() == want.keys()
                for kind, tensor in want.items():
                    same = got[kind] is None if tensor is None else torch.equal(got[kind], tensor)
                    assert same, f"{kind} on rank {rank} of {ranks}"
