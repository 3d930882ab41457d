"""A mesh of some ranks of the world: numbered anew, with groups of its own, beside ranks outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.errors import MeshError
from plait.ranks import Mesh, all_reduce
from plait.ranks.text_collectives import all_gather_text

MEMBERS = (3, 0, 2)


def described() -> dict[str, Any]:
    """What a rank sees of a mesh of ranks 3, 0 and 2 of four, made twice."""
    mesh = Mesh(dp=3, timeout=20.0, ranks=MEMBERS)
    again = Mesh(pp=2, timeout=20.0, ranks=(1, 3))
    told: dict[str, Any] = {"rank": mesh.rank, "again": again.rank, "has": mesh.has_this_rank}
    world = all_gather_text(str(mesh.rank), mesh.all_ranks, mesh.device)
    told["world"], told["index"] = world, mesh.all_ranks.index
    if mesh.has_this_rank:
        own = torch.tensor([2.0**mesh.rank])
        told["sum"] = all_reduce(own, mesh.group("dp")).wait().item()
    else:
        with pytest.raises(
            MeshError, match="this rank is not in the mesh, whose ranks are 3, 0, 2 of the world"
        ):
            mesh.group("dp")
    told["text"] = repr(mesh)
    return told


@pytest.mark.parametrize("ranks_as", ["threads", "processes"])
def test_ranks_of_a_part_of_the_world_are_numbered_in_the_order_given(
    rank_pool: Any, thread_ranks: Any, ranks_as: str
) -> None:
    told = (thread_ranks if ranks_as == "threads" else rank_pool).run(described, ranks=4)
    assert [one["rank"] for one in told] == [1, -1, 2, 0]
    assert [one["again"] for one in told] == [-1, 0, -1, 1]
    assert [one["index"] for one in told] == [0, 1, 2, 3]
    assert all(one["world"] == ["1", "-1", "2", "0"] for one in told)
    assert [one.get("sum") for one in told] == [7.0, None, 7.0, 7.0]
    assert told[3]["text"] == "Mesh(pp=1, replicate=1, shard=3, cp=1, tp=1; rank 0 at shard=0)"
    assert told[1]["text"] == "Mesh(pp=1, replicate=1, shard=3, cp=1, tp=1; without this rank)"


def losses() -> list[float] | None:
    plan = plait.Plan(pp=2, dp=1, microbatches=2, precision="fp64")
    mesh = Mesh(plan, timeout=20.0, ranks=(2, 0))
    if not mesh.has_this_rank:
        return None
    model = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=11, context=4)
    engine = plait.parallelize(model, plan, mesh, loss=plait.cross_entropy)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    tokens = torch.arange(20).view(4, 5) % 11
    found = []
    for _ in range(2):
        found.append(engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item())
        engine.step(optimizer, 1.0)
        optimizer.zero_grad()
    return found


def test_an_engine_trains_on_some_ranks_of_the_world(thread_ranks: Any) -> None:
    some = thread_ranks.run(losses, ranks=3)
    assert some[1] is None
    assert some[0] == some[2]
    assert some[0][1] < some[0][0]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((0, 0), r"ranks are \[0, 0\], but the world has the ranks 0 to 1: give each of those at most once"),
        ((1, 2), r"ranks are \[1, 2\], but the world has the ranks 0 to 1: "),
        ((), r"ranks are \[\], but the world has the ranks 0 to 1: "),
        ((1,), r"the mesh needs 2 ranks \(pp 1 × dp 2 × cp 1 × tp 1\) but is given \[1\] of the world: "),
    ],
)
def test_ranks_that_the_world_does_not_have_are_refused(
    thread_ranks: Any, ranks: tuple[int, ...], said: str
) -> None:
    def body() -> None:
        with pytest.raises(MeshError, match=said):
            Mesh(dp=2, ranks=ranks)

    thread_ranks.run(body, ranks=2)
