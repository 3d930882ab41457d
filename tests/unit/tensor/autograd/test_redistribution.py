"""Every layout to every other, over real ranks: values, gradients, what is sent, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import LayoutError
from plait.plan.layout import Flat, Layout, Partial, Placement, Replicate, Shard, assemble, moves, shard
from plait.ranks import Count, GridMesh, Mesh
from plait.tensor import redistribute

AXES = (
    {"tp": 4},
    {"shard": 2, "tp": 2},
    {"replicate": 2, "shard": 2},
    {"replicate": 2, "shard": 1, "tp": 2},
    {"rows": 2, "columns": 2},
    {"shard": 2, "cp": 2},
)
"""Of meshes of 4 ranks."""


@dataclass(frozen=True)
class Case:
    source: Layout
    target: Layout
    own: tuple[str, ...]


@cache
def along_an_axis(dims: int, degree: int) -> st.SearchStrategy[Placement]:
    copies = st.sampled_from([n for n in range(1, degree + 1) if degree % n == 0])
    shards = st.builds(Shard, st.integers(0, dims - 1), copies)
    return st.one_of(st.just(Replicate()), st.just(Partial()), shards, shards)


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], axes: Mapping[str, int]) -> dict[str, Placement]:
    found = {axis: draw(along_an_axis(len(shape), degree)) for axis, degree in axes.items()}
    flat = draw(st.sampled_from([(), (), *((axis,) for axis in axes), tuple(axes)]))
    if flat:
        left = Layout(shape, axes, found | dict.fromkeys(flat, Replicate()))
        most, shards = prod(left.region([0] * len(axes)).sizes), prod(axes[axis] for axis in flat)
        cuts = draw(st.lists(st.integers(0, most), min_size=shards - 1, max_size=shards - 1))
        bounds = (0, *sorted(cuts), most)
        for axis in flat:
            shards //= axes[axis]
            found[axis] = Flat(bounds[::shards])
    return found


@st.composite
def cases(draw: st.DrawFn, axes: Mapping[str, int]) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    source, target = (Layout(shape, axes, draw(placements(shape, axes))) for _ in range(2))
    replicated = [a for a, p in zip(target.axes, target.placements, strict=True) if isinstance(p, Replicate)]
    own = draw(st.lists(st.sampled_from(replicated), unique=True)) if replicated else []
    return Case(source, target, tuple(own))


def mesh_of(axes: Mapping[str, int]) -> GridMesh:
    """The mesh whose axes these are."""
    if "rows" in axes:
        return GridMesh(**axes)
    replicate, shards = axes.get("replicate", 1), axes.get("shard", 1)
    return Mesh(replicate=replicate, dp=replicate * shards, cp=axes.get("cp", 1), tp=axes.get("tp", 1))


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def local(layout: Layout, where: tuple[int, ...], seed: int) -> Tensor:
    """A rank's shard of a value whose summands, where it has some, are numbers of each rank's own."""
    partial = [isinstance(placement, Partial) for placement in layout.placements]
    number = sum(i * 10**n for n, (i, p) in enumerate(zip(where, partial, strict=True)) if p)
    return shard(drawn(layout.shape, seed + number), without_partial(layout), where)


def without_partial(layout: Layout) -> Layout:
    kept = {
        a: Replicate() if isinstance(p, Partial) else p
        for a, p in zip(layout.axes, layout.placements, strict=True)
    }
    return Layout(layout.shape, dict(zip(layout.axes, layout.degrees, strict=True)), kept)


def gradient_layout(case: Case) -> Layout:
    """Of what the result's gradient is drawn as: a summand where the result is each rank's own."""
    axes, whole = case.target.axes, without_partial(case.target)
    kept = {a: Partial() if a in case.own else p for a, p in zip(axes, whole.placements, strict=True)}
    return Layout(whole.shape, dict(zip(axes, whole.degrees, strict=True)), kept)


def there_and_back(axes: Mapping[str, int], drawn_cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    """On each rank: its shard of the result, and of the gradient of what it started from."""
    mesh, results = mesh_of(axes), []
    for case in drawn_cases:
        where = tuple(mesh.index(axis) for axis in case.source.axes)
        leaf = local(case.source, where, 1).requires_grad_()
        output = redistribute(leaf, case.source, case.target, mesh, own=case.own)
        gradient = local(gradient_layout(case), where, 2)
        (back,) = torch.autograd.grad(output, leaf, gradient)
        results.append((output.detach(), back))
    return results


def close(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "-".join(f"{a}{n}" for a, n in axes.items()))
def test_redistribute_between_any_two_layouts_gives_the_value_and_its_gradient(
    thread_ranks: Any, axes: Mapping[str, int]
) -> None:
    # Making a mesh takes longer than many cases: so few examples, of many cases each.
    @settings(max_examples=max(2, settings().max_examples // 25), phases=[Phase.generate])
    @given(st.lists(cases(axes), min_size=40, max_size=40))
    def check(drawn_cases: list[Case]) -> None:
        ranks = thread_ranks.run(there_and_back, axes, drawn_cases, ranks=4)
        for case, results in zip(drawn_cases, zip(*ranks, strict=True), strict=True):
            outputs, gradients = zip(*results, strict=True)
            value = assemble([local(case.source, c, 1) for c in case.source.coordinates()], case.source)
            close(assemble(outputs, case.target), value)
            coming = gradient_layout(case)
            whole = assemble([local(coming, c, 2) for c in coming.coordinates()], coming)
            going = without_partial(case.source)
            for coordinate, gradient in zip(going.coordinates(), gradients, strict=True):
                close(gradient, shard(whole, going, coordinate))

    check()


def laid(axis: str, placement: Placement, shape: tuple[int, ...] = (4, 6), ranks: int = 2) -> Layout:
    return Layout(shape, {axis: ranks}, {axis: placement})


TRANSITIONS = {
    # source, target, own: forward, backward, each kind and the bytes of float64
    "split": (Replicate(), Shard(0), (), {}, {"all_gather": 96}),
    "gather": (Shard(1), Replicate(), (), {"all_gather": 96}, {}),
    "reduce": (Partial(), Replicate(), (), {"all_reduce": 192}, {}),
    "copy": (Replicate(), Replicate(), ("tp",), {}, {"all_reduce": 192}),
    "enter a sequence": (Shard(0), Replicate(), ("tp",), {"all_gather": 96}, {"reduce_scatter": 192}),
    "leave to a sequence": (Partial(), Shard(0), (), {"reduce_scatter": 192}, {"all_gather": 96}),
    "other dim": (Shard(0), Shard(1), (), {"all_to_all": 96}, {"all_to_all": 96}),
    "summands": (Shard(0), Partial(), (), {}, {}),
    "flat": (Flat((0, 12, 24)), Replicate(), (), {"all_gather": 96}, {}),
    "another cut": (Flat((0, 12, 24)), Shard(1), (), {"all_gather": 96}, {"all_gather": 96}),
    "nothing": (Shard(1), Shard(1), (), {}, {}),
}


def counted(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is sent forward and backward."""
    before, after, own, _, _ = TRANSITIONS[name]
    mesh, source, target = Mesh(tp=2), laid("tp", before), laid("tp", after)
    leaf = local(source, (mesh.index("tp"),), 1).requires_grad_()
    start = mesh.traffic.snapshot()
    output = redistribute(leaf, source, target, mesh, own=own)
    middle = mesh.traffic.snapshot()
    forward = mesh.traffic.since(start)
    output.sum().backward()
    return forward, mesh.traffic.since(middle)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_each_transition_between_layouts_makes_the_listed_collectives(thread_ranks: Any, name: str) -> None:
    wanted = [
        {"tp": {kind: Count(1, size) for kind, size in kinds.items()}} if kinds else {}
        for kinds in TRANSITIONS[name][3:]
    ]
    assert thread_ranks.run(counted, name, ranks=2) == [tuple(wanted)] * 2


@given(st.sampled_from(AXES).flatmap(cases))
def test_moves_form_a_path_from_the_source_to_the_target_layout(case: Case) -> None:
    path = moves(case.source, case.target)
    layouts = [case.source, *(move.target for move in path)]
    assert [move.source for move in path] == layouts[:-1]
    assert layouts[-1] == case.target
    for move in path:
        pairs = zip(move.source.axes, move.source.placements, move.target.placements, strict=True)
        assert [axis for axis, before, after in pairs if before != after] == [move.axis]


def test_redistribute_cuts_before_it_communicates() -> None:
    """Half as much is then summed, or gathered."""
    axes = {"shard": 2, "tp": 2}
    source = Layout((8, 8), axes, {"tp": Partial()})
    target = Layout((8, 8), axes, {"shard": Shard(0)})
    assert [(move.axis, move.by) for move in moves(source, target)] == [
        ("shard", "cut"),
        ("tp", "all_reduce"),
    ]


def test_redistribute_gathers_an_inner_axis_to_remove_an_outer_cut_and_cuts_again() -> None:
    axes = {"shard": 2, "tp": 2}
    source = Layout((8, 8), axes, {"shard": Shard(0), "tp": Shard(0)})
    target = Layout((8, 8), axes, {"tp": Shard(0)})
    assert [(move.axis, move.by) for move in moves(source, target)] == [
        ("tp", "all_gather"),
        ("shard", "all_gather"),
        ("tp", "cut"),
    ]


def test_redistribute_over_combined_axes_and_back_keeps_the_value(thread_ranks: Any) -> None:
    def body() -> Tensor:
        mesh = Mesh(dp=2, tp=2, replicate=2)
        layout = Layout((5, 2), {"dp": 2, "tp": 2}, {"dp": Shard(0), "tp": Shard(1)})
        where = (mesh.index("dp"), mesh.index("tp"))
        mine = shard(drawn((5, 2), 1), layout, where)
        cut, rows = Layout((4, 2), {"dp": 2}, {"dp": Shard(0)}), Layout((4, 2), {"dp": 2}, {"dp": Shard(1)})
        on_meta = redistribute(torch.empty(2, 2, device="meta"), cut, rows, mesh)  # no region, without tp
        assert on_meta.is_meta
        assert on_meta.shape == (4, 1)
        return redistribute(mine, layout, Layout((5, 2), {"dp": 2, "tp": 2}), mesh)

    assert all(torch.equal(result, drawn((5, 2), 1)) for result in thread_ranks.run(body, ranks=4))


def test_redistribute_on_one_rank_returns_the_tensor() -> None:
    tensor = torch.ones(4, 6, requires_grad=True)
    axes = {"shard": 1, "tp": 1}
    source, target = Layout((4, 6), axes, {"tp": Partial()}), Layout((4, 6), axes, {"tp": Shard(1)})
    output = redistribute(tensor, source, target, Mesh())
    (gradient,) = torch.autograd.grad(output, tensor, torch.full((4, 6), 3.0))
    assert torch.equal(output, tensor)
    assert torch.equal(gradient, torch.full((4, 6), 3.0))
    assert redistribute(tensor, source, source, Mesh()) is tensor


def test_redistribute_refuses_second_order_gradients(thread_ranks: Any) -> None:
    def body() -> None:
        mesh, leaf = Mesh(tp=2), torch.ones(4, 6, requires_grad=True)
        output = redistribute(leaf, laid("tp", Replicate()), laid("tp", Shard(0)), mesh)
        (gradient,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    thread_ranks.run(body, ranks=2)


REFUSED = {
    "shapes": (
        laid("tp", Shard(0)),
        laid("tp", Shard(0), (6, 4)),
        (),
        (4, 6),
        "one shape over the same axes",
    ),
    "axes": (laid("tp", Shard(0)), laid("shard", Shard(0)), (), (4, 6), "one shape over the same axes"),
    "degree": (laid("tp", Shard(0), ranks=2), laid("tp", Shard(1), ranks=2), (), (2, 6), "does not fit Mesh"),
    "shard": (Layout((4, 6), {"tp": 1}), Layout((4, 6), {"tp": 1}), (), (4, 5), r"give its shard, \[4, 6\]"),
    "twice": (
        Layout((4, 6), {"dp": 1, "shard": 1}),
        Layout((4, 6), {"dp": 1, "shard": 1}),
        (),
        (4, 6),
        "none twice",
    ),
    "own": (
        Layout((4, 6), {"tp": 1}),
        Layout((4, 6), {"tp": 1}, {"tp": Shard(0)}),
        ("tp",),
        (4, 6),
        "own names axis 'tp'",
    ),
    "blocks": (
        Layout((4, 6), {"tp": 1}, {"tp": Shard(0, blocks=2)}),
        Layout((4, 6), {"tp": 1}),
        (),
        (4, 6),
        "where a dim is sharded block by block: give that dim as two",
    ),
    "into blocks": (
        Layout((4, 6), {"tp": 1}),
        Layout((4, 6), {"tp": 1}, {"tp": Shard(0, blocks=2)}),
        (),
        (4, 6),
        "where a dim is sharded block by block: give that dim as two",
    ),
    "own axis": (
        Layout((4, 6), {"tp": 1}),
        Layout((4, 6), {"tp": 1}),
        ("pp",),
        (4, 6),
        "own names axis 'pp'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_redistribute_refuses_layouts_that_do_not_fit_the_tensor(name: str) -> None:
    source, target, own, shape, sentence = REFUSED[name]
    with pytest.raises(LayoutError, match=sentence):
        redistribute(torch.ones(shape), source, target, Mesh(), own=own)
