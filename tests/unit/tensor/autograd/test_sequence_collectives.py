"""Parts of a sequence: in and out of regions, there and back outside of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from plait.errors import CommunicationError
from plait.plan.layout import divide
from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor.autograd.paired_collectives import (
    collective_of,
    gather_in,
    scatter_out,
    to_parts,
    to_whole,
)

SHAPES = [(7,), (7, 7), (3, 7), (7, 7, 7), (2, 7, 5, 3)]
"""7 is uneven for 2 and 3 ranks; where shapes are square a wrong dim would fit."""
CASES = [(shape, dim) for shape in SHAPES for dim in range(-len(shape), len(shape)) if shape[dim] == 7]
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3])


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def total(shape: tuple[int, ...], ranks: int) -> Tensor:
    """The sum of what the ranks draw."""
    return torch.stack([draw(shape, 1 + rank) for rank in range(ranks)]).sum(0)


def strided(tensor: Tensor) -> Tensor:
    """The same values, not contiguous where there are two elements."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def part(tensor: Tensor, ranks: int, index: int, dim: int) -> Tensor:
    own = divide(tensor.shape[dim], ranks)[index]
    return tensor.narrow(dim, own.start, len(own))


def backward(output: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(output, leaf, gradient)
    return result


def in_and_back(ranks: int) -> list[tuple[Tensor, Tensor]]:
    group, results = Mesh(tp=ranks).group("tp"), []
    for shape, dim in CASES:
        leaf = strided(part(draw(shape, 0), ranks, group.index, dim)).requires_grad_()
        output = gather_in(leaf, group, dim, 7)
        gradient = strided(draw(shape, 1 + group.index))
        results.append((output.detach(), backward(output, leaf, gradient)))
        assert torch.equal(gradient, draw(shape, 1 + group.index)), "others may hold the gradient too"
    return results


@RANKS
def test_gather_in_joins_parts_and_scatters_sums_of_gradients(thread_ranks: Any, ranks: int) -> None:
    for index, results in enumerate(thread_ranks.run(in_and_back, ranks, ranks=ranks)):
        for (shape, dim), (output, gradient) in zip(CASES, results, strict=True):
            assert torch.equal(output, draw(shape, 0))
            wanted = part(total(shape, ranks), ranks, index, dim)
            torch.testing.assert_close(gradient, wanted, rtol=1e-14, atol=1e-14)


def out_and_back(ranks: int) -> list[tuple[Tensor, Tensor]]:
    group, results = Mesh(tp=ranks).group("tp"), []
    for shape, dim in CASES:
        leaf = draw(shape, 1 + group.index).requires_grad_()
        output = scatter_out(strided(leaf * 1), group, dim)
        mine = strided(part(draw(shape, 9), ranks, group.index, dim))
        results.append((output.detach(), backward(output, leaf, mine)))
    return results


@RANKS
def test_scatter_out_scatters_sums_and_joins_gradients(thread_ranks: Any, ranks: int) -> None:
    for index, results in enumerate(thread_ranks.run(out_and_back, ranks, ranks=ranks)):
        for (shape, dim), (output, gradient) in zip(CASES, results, strict=True):
            wanted = part(total(shape, ranks), ranks, index, dim)
            torch.testing.assert_close(output, wanted, rtol=1e-14, atol=1e-14)
            assert torch.equal(gradient, draw(shape, 9))


def there_and_back(ranks: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    group, results = Mesh(tp=ranks).group("tp"), []
    for shape, dim in CASES:
        leaf = strided(draw(shape, 0)).requires_grad_()
        mine = to_parts(leaf, group, dim)
        whole = to_whole(strided(mine), group, dim, 7)
        results.append((mine.detach(), whole.detach(), backward(whole, leaf, strided(draw(shape, 9)))))
    return results


@RANKS
def test_to_parts_then_to_whole_gives_the_tensor_and_its_gradient(thread_ranks: Any, ranks: int) -> None:
    for index, results in enumerate(thread_ranks.run(there_and_back, ranks, ranks=ranks)):
        for (shape, dim), (mine, whole, gradient) in zip(CASES, results, strict=True):
            assert torch.equal(mine, part(draw(shape, 0), ranks, index, dim))
            assert torch.equal(whole, draw(shape, 0))
            assert torch.equal(gradient, draw(shape, 9))


def few_positions() -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Two for three ranks."""
    group = Mesh(tp=3).group("tp")
    leaf = draw((4, 2), 0).requires_grad_()
    mine = to_parts(leaf, group, -1)
    left = scatter_out(gather_in(mine, group, -1, 2) * 1, group, -1)
    output = to_whole(left, group, -1, 2)
    return output.detach(), backward(output, leaf, draw((4, 2), 9)), tuple(left.shape)


def test_sequence_collectives_work_with_more_ranks_than_positions(thread_ranks: Any) -> None:
    outputs, gradients, shapes = zip(*thread_ranks.run(few_positions, ranks=3), strict=True)
    assert shapes == ((4, 1), (4, 1), (4, 0))
    for output, gradient in zip(outputs, gradients, strict=True):  # in a region all did the same
        torch.testing.assert_close(output, 3 * draw((4, 2), 0), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(gradient, 3 * draw((4, 2), 9), rtol=1e-14, atol=1e-14)


def written_to(shape: tuple[int, ...], dim: int) -> list[Tensor]:
    """The gradients of what was given, where results are multiplied in place."""
    group, gradients = Mesh(tp=2).group("tp"), []
    size = shape[dim]
    for turn, given in (
        (lambda tensor: gather_in(tensor, group, dim, size), part(draw(shape, 0), 2, group.index, dim)),
        (lambda tensor: scatter_out(tensor, group, dim), draw(shape, 0)),
        (lambda tensor: to_parts(tensor, group, dim), draw(shape, 0)),
        (lambda tensor: to_whole(tensor, group, dim, size), part(draw(shape, 0), 2, group.index, dim)),
    ):
        leaf = given.contiguous().requires_grad_()
        turn(leaf).mul_(3).sum().backward()  # type: ignore[no-untyped-call]
        assert torch.equal(leaf.detach(), given), "what is given stays as it is"
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return gradients


@pytest.mark.parametrize(("shape", "dim"), [((4, 3), 0), ((5, 3), 0), ((2, 2, 3), 1), ((1, 3, 3), 1)])
def test_results_of_sequence_collectives_may_be_modified_in_place(
    thread_ranks: Any, shape: tuple[int, ...], dim: int
) -> None:
    """Along the first dim, and of a single row, a part would be a view."""
    for entered, *others in thread_ranks.run(written_to, shape, dim, ranks=2):
        assert torch.equal(entered, torch.full_like(entered, 6))
        assert all(torch.equal(gradient, torch.full_like(gradient, 3)) for gradient in others)


def test_sequence_collectives_make_the_listed_collectives(thread_ranks: Any) -> None:
    def body() -> dict[str, Any]:
        mesh, counts = Mesh(tp=2), {}
        group = mesh.group("tp")
        for name, operation in {
            "gather_in": lambda tensor: gather_in(tensor, group, 0, 7),
            "scatter_out": lambda tensor: scatter_out(tensor, group, 0),
            "to_whole": lambda tensor: to_whole(tensor, group, 0, 7),
            "to_parts": lambda tensor: to_parts(tensor, group, 0),
        }.items():
            rows = (4, 3)[group.index] if name in ("gather_in", "to_whole") else 7
            start = mesh.traffic.snapshot()
            output = operation(torch.zeros(rows, 2, requires_grad=True))
            middle, forward = mesh.traffic.snapshot(), mesh.traffic.since(start)
            output.sum().backward()
            counts[name] = forward, mesh.traffic.since(middle)
        return counts

    joined, summed = {"tp": {"all_gather": Count(1, 32)}}, {"tp": {"reduce_scatter": Count(1, 64)}}
    for counts in thread_ranks.run(body, ranks=2):  # parts are padded to four rows
        assert counts == {
            "gather_in": (joined, summed),
            "scatter_out": (summed, joined),
            "to_whole": (joined, {}),
            "to_parts": ({}, joined),
        }


def test_the_overlap_callback_of_gather_in_runs_once_while_gradients_are_summed(thread_ranks: Any) -> None:
    def body() -> list[Any]:
        mesh, counted = Mesh(tp=2), []
        leaf = torch.ones(2, requires_grad=True)
        group = mesh.group("tp")
        output = gather_in(leaf, group, 0, 4, lambda: counted.append(mesh.traffic.snapshot()))
        assert counted == []
        output.sum().backward()  # type: ignore[no-untyped-call]
        return counted

    both = {"all_gather": Count(1, 8), "reduce_scatter": Count(1, 16)}
    assert thread_ranks.run(body, ranks=2) == [[{"tp": both}]] * 2


def lonely(size: int) -> Group:
    """A group for what never communicates."""
    return Group("tp", tuple(range(size)), 1, None, Traffic(), 1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_sequence_collectives_on_meta_give_the_shapes_of_real_tensors(shape: tuple[int, ...]) -> None:
    group, dim = lonely(3), shape.index(7) - len(shape)
    leaf = torch.empty(shape, device="meta", requires_grad=True)
    mine = to_parts(leaf, group, dim)
    entered = gather_in(mine, group, dim, 7)
    left = scatter_out(entered * 1, group, dim)
    output = to_whole(left, group, dim, 7)
    marks = [collective_of(get_gradient_edge(one).node) for one in (mine, entered, left, output)]
    assert marks == ["to_parts", "gather_in", "scatter_out", "to_whole"]
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert mine.shape == left.shape == part(torch.empty(shape), 3, 1, dim).shape
    assert output.shape == entered.shape == leaf.shape == leaf.grad.shape  # type: ignore[union-attr]


def test_sequence_collectives_of_one_rank_return_the_tensor() -> None:
    group, tensor = Mesh().group("tp"), torch.ones(3, requires_grad=True)
    assert gather_in(tensor, group, 0, 3) is tensor
    assert scatter_out(tensor, group, 0) is tensor
    assert to_parts(tensor, group, 0) is tensor
    assert to_whole(tensor, group, 0, 3) is tensor


def test_a_guarded_group_checks_tensors_before_it_cuts_them(thread_ranks: Any) -> None:
    def body() -> Tensor:
        group = Mesh(tp=2, guarded=True).group("tp")
        with pytest.raises(CommunicationError, match="the ranks of tp do not agree"):
            to_parts(draw((4, 2), group.index), group, 0)
        return to_whole(to_parts(draw((4, 2), 0), group, 0), group, 0, 4)

    assert all(torch.equal(found, draw((4, 2), 0)) for found in thread_ranks.run(body, ranks=2))
