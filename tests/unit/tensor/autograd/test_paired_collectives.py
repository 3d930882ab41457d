from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import CommunicationError
from plait.plan.layout import divide
from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor.autograd.paired_collectives import copy, gather, reduce, split

SHAPES = [(7,), (7, 7), (3, 7), (7, 7, 7), (2, 7, 5, 3)]
"""7 is uneven for 2 and 3 ranks; where shapes are square a wrong dim would fit."""
CASES = [(shape, dim) for shape in SHAPES for dim in range(-len(shape), len(shape)) if shape[dim] == 7]


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def strided(tensor: Tensor) -> Tensor:
    """The same values, not contiguous where there are two elements."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def part(tensor: Tensor, ranks: int, index: int, dim: int) -> Tensor:
    own = divide(tensor.shape[dim], ranks)[index]
    return tensor.narrow(dim, own.start, len(own))


def backward(output: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(output, leaf, gradient)
    return result


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_copy_sums_gradients_over_the_ranks(thread_ranks: Any, ranks: int) -> None:
    def body() -> list[tuple[Tensor, Tensor]]:
        group, results = Mesh(tp=ranks).group("tp"), []
        for shape in SHAPES:
            leaf = strided(draw(shape, 0)).requires_grad_()
            output = copy(leaf, group)
            gradient = strided(draw(shape, 1 + group.index))
            kept = gradient.clone()
            results.append((output.detach(), backward(output, leaf, gradient)))
            assert torch.equal(gradient, kept), "others may hold the gradient too"
        return results

    for results in thread_ranks.run(body, ranks=ranks):
        for shape, (output, gradient) in zip(SHAPES, results, strict=True):
            assert torch.equal(output, draw(shape, 0))
            wanted = torch.stack([draw(shape, 1 + rank) for rank in range(ranks)]).sum(0)
            torch.testing.assert_close(gradient, wanted, rtol=1e-14, atol=1e-14)


def test_copy_sums_gradients_that_take_no_memory(thread_ranks: Any) -> None:
    def body() -> Tensor | None:
        group = Mesh(tp=2).group("tp")
        leaf = draw((3, 4), 0).requires_grad_()
        (copy(leaf, group) * (1 + group.index) if group.index else copy(leaf, group)).sum().backward()
        return leaf.grad

    for gradient in thread_ranks.run(body, ranks=2):
        assert torch.equal(gradient, torch.full((3, 4), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_reduce_sums_forward_and_leaves_gradients(thread_ranks: Any, ranks: int) -> None:
    def body() -> list[tuple[Tensor, Tensor, bool]]:
        group, results = Mesh(tp=ranks).group("tp"), []
        for shape in SHAPES:
            leaf = draw(shape, group.index).requires_grad_()
            summand = strided(leaf * 1)
            output = reduce(summand, group)
            in_place = output.data_ptr() == summand.data_ptr()
            results.append((output.detach(), backward(output, leaf, strided(draw(shape, 9))), in_place))
        return results

    for results in thread_ranks.run(body, ranks=ranks):
        for shape, (output, gradient, in_place) in zip(SHAPES, results, strict=True):
            wanted = torch.stack([draw(shape, rank) for rank in range(ranks)]).sum(0)
            torch.testing.assert_close(output, wanted, rtol=1e-14, atol=1e-14)
            assert torch.equal(gradient, draw(shape, 9))
            assert in_place


def test_the_output_of_reduce_may_be_modified_in_place(thread_ranks: Any) -> None:
    def body() -> Tensor | None:
        leaf = draw((3,), 0).requires_grad_()
        reduce(leaf * 1, Mesh(tp=2).group("tp")).mul_(3).sum().backward()
        return leaf.grad

    for gradient in thread_ranks.run(body, ranks=2):
        assert torch.equal(gradient, torch.full((3,), 3.0, dtype=torch.float64))


def test_reduce_reports_an_error_to_autograd_if_its_summand_was_saved(thread_ranks: Any) -> None:
    """It is written to: a backward that needs it must not go on with the sum."""

    def body() -> None:
        leaf = draw((3,), 0).requires_grad_()
        saved = leaf.exp()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            reduce(saved, Mesh(tp=2).group("tp")).sum().backward()

    thread_ranks.run(body, ranks=2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gather_joins_parts_and_cuts_gradients(thread_ranks: Any, ranks: int) -> None:
    def body() -> list[tuple[Tensor, Tensor]]:
        group, results = Mesh(tp=ranks).group("tp"), []
        for shape, dim in CASES:
            leaf = strided(part(draw(shape, 0), ranks, group.index, dim)).requires_grad_()
            output = gather(leaf, group, dim, 7)
            results.append((output.detach(), backward(output, leaf, strided(draw(shape, 9)))))
        return results

    for index, results in enumerate(thread_ranks.run(body, ranks=ranks)):
        for (shape, dim), (output, gradient) in zip(CASES, results, strict=True):
            assert torch.equal(output, draw(shape, 0))
            assert torch.equal(gradient, part(draw(shape, 9), ranks, index, dim))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_split_cuts_forward_and_joins_gradients(thread_ranks: Any, ranks: int) -> None:
    def body() -> list[tuple[Tensor, Tensor]]:
        group, results = Mesh(tp=ranks).group("tp"), []
        for shape, dim in CASES:
            leaf = strided(draw(shape, 0)).requires_grad_()
            output = split(leaf, group, dim)
            mine = strided(part(draw(shape, 9), ranks, group.index, dim))
            results.append((output.detach(), backward(output, leaf, mine)))
        return results

    for index, results in enumerate(thread_ranks.run(body, ranks=ranks)):
        for (shape, dim), (output, gradient) in zip(CASES, results, strict=True):
            assert torch.equal(output, part(draw(shape, 0), ranks, index, dim))
            assert torch.equal(gradient, draw(shape, 9))


def test_split_and_gather_work_with_more_ranks_than_columns(thread_ranks: Any) -> None:
    def body() -> tuple[Tensor, tuple[int, ...]]:
        group = Mesh(tp=3).group("tp")
        leaf = draw((4, 2), 0).requires_grad_()
        mine = split(leaf, group, -1)
        gather(mine, group, -1, 2).backward(draw((4, 2), 9))
        assert leaf.grad is not None
        return leaf.grad, tuple(mine.shape)

    gradients, shapes = zip(*thread_ranks.run(body, ranks=3), strict=True)
    assert shapes == ((4, 1), (4, 1), (4, 0))
    assert all(torch.equal(gradient, draw((4, 2), 9)) for gradient in gradients)


def test_copy_reduce_gather_and_split_make_the_listed_collectives(thread_ranks: Any) -> None:
    def body() -> dict[str, Any]:
        mesh, counts = Mesh(tp=2), {}
        group = mesh.group("tp")
        for name, operation in {
            "copy": lambda tensor: copy(tensor, group),
            "reduce": lambda tensor: reduce(tensor * 1, group),
            "gather": lambda tensor: gather(tensor, group, 0, 7),
            "split": lambda tensor: split(tensor, group, 0),
        }.items():
            rows = 7 if name != "gather" else (4, 3)[group.index]
            start = mesh.traffic.snapshot()
            output = operation(torch.zeros(rows, 2, requires_grad=True))
            middle = mesh.traffic.snapshot()
            forward = mesh.traffic.since(start)
            output.sum().backward()
            counts[name] = forward, mesh.traffic.since(middle)
        return counts

    whole, padded = {"tp": {"all_reduce": Count(1, 56)}}, {"tp": {"all_gather": Count(1, 32)}}
    for counts in thread_ranks.run(body, ranks=2):
        assert counts == {
            "copy": ({}, whole),
            "reduce": (whole, {}),
            "gather": (padded, {}),
            "split": ({}, padded),
        }


def test_the_overlap_callback_of_copy_runs_once_while_gradients_are_summed(thread_ranks: Any) -> None:
    def body() -> tuple[list[str], Any]:
        mesh, events = Mesh(tp=2), []
        counted: list[Any] = []

        def overlap() -> None:
            events.append("overlap")
            counted.append(mesh.traffic.snapshot())

        leaf = torch.ones(3, requires_grad=True)
        output = copy(leaf, mesh.group("tp"), overlap) * 2
        events.append("forward")
        output.sum().backward()
        return events, counted

    for events, counted in thread_ranks.run(body, ranks=2):
        assert events == ["forward", "overlap"]
        assert counted == [{"tp": {"all_reduce": Count(1, 12)}}]


def lonely(size: int) -> Group:
    """A group for what never communicates."""
    return Group("tp", tuple(range(size)), 1, None, Traffic(), 1.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_paired_collectives_on_meta_give_the_shapes_of_real_tensors(shape: tuple[int, ...]) -> None:
    group, dim = lonely(3), shape.index(7) - len(shape)
    leaf = torch.empty(shape, device="meta", requires_grad=True)
    mine = split(copy(leaf, group), group, dim)
    assert mine.shape == part(torch.empty(shape), 3, 1, dim).shape
    output = gather(reduce(mine * 1, group), group, dim, 7)
    output.sum().backward()
    assert output.shape == leaf.shape == leaf.grad.shape


def test_paired_collectives_of_one_rank_return_the_tensor() -> None:
    group = Mesh().group("tp")
    tensor = torch.ones(3, requires_grad=True)
    assert copy(tensor, group) is tensor
    assert reduce(tensor, group) is tensor
    assert gather(tensor, group, 0, 3) is tensor
    assert split(tensor, group, 0) is tensor


def test_copy_without_gradients_makes_no_graph() -> None:
    frozen, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    assert copy(frozen, lonely(2)) is frozen
    with torch.no_grad():
        assert copy(leaf, lonely(2)) is leaf


ENTRANCES: dict[str, Callable[[Tensor, Group], Tensor]] = {
    "copy": copy,
    "split": lambda tensor, group: split(tensor, group, -1),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_guarded_copy_refuses_tensors_that_differ_between_ranks(
    thread_ranks: Any, entrance: str, gradients: bool
) -> None:
    """The last bit of one element on rank 1, a sign of zero, another shape, another dtype."""

    def body() -> list[str]:
        group, odd = Mesh(tp=3, guarded=True).group("tp"), 1
        zeros = torch.zeros(2, 6, dtype=torch.float64)
        given = {
            "bits": draw((2, 6), 0).nextafter(torch.tensor(9.0)) if group.index == odd else draw((2, 6), 0),
            "sign": -zeros if group.index == odd else zeros,
            "shape": zeros.view(6, 2) if group.index == odd else zeros,
            "dtype": zeros.float() if group.index == odd else zeros,
        }
        messages = []
        for tensor in given.values():
            with torch.set_grad_enabled(gradients), pytest.raises(CommunicationError) as caught:
                ENTRANCES[entrance](tensor.requires_grad_(gradients), group)
            messages.append(str(caught.value))
        ENTRANCES[entrance](zeros, group)  # the group goes on
        return messages

    results = thread_ranks.run(body, ranks=3)
    assert results[0] == results[1] == results[2]
    whole = "float64[2, 6]"
    for message, odd in zip(results[0], (whole, whole, "float64[6, 2]", "float32[2, 6]"), strict=True):
        said = re.fullmatch(
            r"the ranks of tp do not agree \(ranks 0, 2: enter a region .* with (\S+ ?\S+) of bits (\w{16}); "
            r"rank 1: enter a region .* with (\S+ ?\S+) of bits (\w{16})\): .*",
            message,
        )
        assert said is not None, message
        assert (said[1], said[3]) == (whole, odd)
        assert (said[2] != said[4]) == (odd == whole)  # zeros of any shape have the same bits


def test_a_guarded_copy_accepts_equal_tensors(thread_ranks: Any) -> None:
    def body(guarded: bool) -> tuple[list[Tensor], dict[str, Any]]:
        mesh = Mesh(tp=2, guarded=guarded)
        group, results = mesh.group("tp"), []
        for entrance in ENTRANCES.values():
            leaf = strided(draw((3, 6), 0)).requires_grad_()
            leaf.data[0, 0] = torch.nan
            output = entrance(leaf, group)
            results += [output.detach(), backward(output, leaf, torch.ones_like(output))]
        return results, mesh.traffic.snapshot()["tp"]

    for (results, traffic), (wanted, counted) in zip(
        thread_ranks.run(body, True, ranks=2), thread_ranks.run(body, False, ranks=2), strict=True
    ):
        for result, want in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)
        # two entrances, the all-reduce of the one and the all-gather of the other backward
        assert traffic == counted | {"guard": Count(4, 4 * 256)}


def test_a_guarded_copy_checks_nothing_on_meta_or_on_one_rank(thread_ranks: Any) -> None:
    def body() -> tuple[list[torch.Size], Any]:
        mesh = Mesh(tp=2, guarded=True)
        tensor = torch.empty(4, 2, device="meta", requires_grad=True)
        shapes = [entrance(tensor, mesh.group("tp")).shape for entrance in ENTRANCES.values()]
        return shapes, mesh.traffic.snapshot()

    assert thread_ranks.run(body, ranks=2) == [([(4, 2), (4, 1)], {})] * 2
    group, tensor = Mesh(guarded=True).group("tp"), torch.ones(3)
    assert copy(tensor, group) is split(tensor, group, 0) is tensor
