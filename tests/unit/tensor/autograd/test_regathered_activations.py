"""What linears read, gathered again for their weight work: once for all, and only the part is kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor.autograd.deferred_weight_gradients import linear
from plait.tensor.autograd.paired_collectives import gather_in
from plait.tensor.autograd.regathered_activations import Gather, GatherRegistry, Regathered, own_range
from plait.tensor.autograd.weight_gradient_queue import INPUT_ONLY, WEIGHTS_NEXT, WeightGradientQueue

ROWS, LENGTH, WIDTH = 2, 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def weights() -> list[nn.Parameter]:
    found = [nn.Parameter(draw(4, WIDTH, seed=1 + number)) for number in range(3)]
    for weight in found:
        weight.grad = torch.zeros_like(weight)
    return found


def forward(
    group: Group, queue: WeightGradientQueue, read_by: list[nn.Parameter], seed: int
) -> tuple[Tensor, Tensor, Any]:
    """Three linears that read one gathered sequence: the leaf, their sum, and a reference to the whole."""
    leaf = own_range(draw(ROWS, LENGTH, WIDTH, seed=seed), group, 1).clone().requires_grad_()
    whole = gather_in(leaf, group, 1, LENGTH)
    queue.gathered.add(whole, leaf, Gather(group, 1, LENGTH))
    output = torch.stack([linear(whole, weight, None, queue) for weight in read_by]).sum(0)
    return leaf, output, weakref.ref(whole.untyped_storage())


def one_gather_for_three(spends: bool) -> tuple[list[Tensor], dict[str, Count], int]:
    mesh, queue, learned = Mesh(tp=2), WeightGradientQueue(), weights()
    group = mesh.group("tp")
    queue.mode = WEIGHTS_NEXT if spends else INPUT_ONLY
    _, output, whole = forward(group, queue, learned, seed=0)
    assert whole() is None, "linears keep the part only"
    output.backward(draw(ROWS, LENGTH, 4, seed=9))
    start = mesh.traffic.snapshot()
    with torch.no_grad():
        queue.run()
    gradients = [weight.grad for weight in learned if weight.grad is not None]
    again = mesh.traffic.since(start).get("tp", {})
    return gradients, mesh.traffic.snapshot()["tp"], again.get("all_gather", Count()).calls


@pytest.mark.full
def test_three_linears_that_read_one_tensor_regather_it_once(thread_ranks: Any) -> None:
    rows, read = draw(ROWS, LENGTH, 4, seed=9).flatten(0, 1), draw(ROWS, LENGTH, WIDTH).flatten(0, 1)
    for spends in (False, True):
        for gradients, sent, late in thread_ranks.run(one_gather_for_three, spends, ranks=2):
            assert sent["all_gather"].calls == 2, "one forward, one for all weight work"
            assert late == (0 if spends else 1), "started in the backward, if that does the weight work"
            for gradient in gradients:
                torch.testing.assert_close(gradient, rows.T @ read, rtol=1e-13, atol=1e-13)


def two_micro_batches() -> tuple[list[Tensor], int]:
    """Both wait for their weight work."""
    mesh, queue, learned = Mesh(tp=2), WeightGradientQueue(), weights()
    group = mesh.group("tp")
    for seed in (0, 1):
        forward(group, queue, learned, seed)[1].backward(draw(ROWS, LENGTH, 4, seed=9))
    with torch.no_grad():
        queue.run()
    return [weight.grad for weight in learned if weight.grad is not None], mesh.traffic.snapshot()["tp"][
        "all_gather"
    ].calls


def test_regathered_inputs_of_two_micro_batches_are_not_mixed_up(thread_ranks: Any) -> None:
    rows = draw(ROWS, LENGTH, 4, seed=9).flatten(0, 1)
    read = (draw(ROWS, LENGTH, WIDTH) + draw(ROWS, LENGTH, WIDTH, seed=1)).flatten(0, 1)
    for gradients, calls in thread_ranks.run(two_micro_batches, ranks=2):
        assert calls == 4
        for gradient in gradients:
            torch.testing.assert_close(gradient, rows.T @ read, rtol=1e-13, atol=1e-13)


def lonely() -> Gather:
    return Gather(Group("tp", (0, 1), 0, None, Traffic(), 1.0), 0, 4)


def test_a_registry_returns_one_gather_for_a_tensor_as_long_as_it_is_referenced() -> None:
    registry, part = GatherRegistry(), torch.ones(2, 3)
    first = registry.again(part, lonely())
    assert registry.again(part, lonely()) is first
    assert registry.again(part.clone(), lonely()) is not first
    assert registry.again(part[:1], lonely()) is not first
    gone = weakref.ref(first)
    del first
    assert gone() is None


def test_the_registry_forgets_a_source_with_its_gathered_tensor() -> None:
    registry, part = GatherRegistry(), torch.ones(2, 3)
    whole, kept = torch.ones(4, 3), weakref.ref(part)
    registry.add(whole, part, lonely())
    assert registry.of(whole) is not None
    assert registry.of(torch.ones(4, 3)) is None
    del whole, part
    assert kept() is None


def test_starting_a_regather_twice_gathers_once() -> None:
    part = torch.empty(2, 3, device="meta")
    regathered = Regathered(part, lonely())
    regathered.start()
    regathered.start()
    assert regathered.whole() is regathered.whole()
    assert regathered.whole().shape == (4, 3)


def written_to_after_it_was_gathered() -> list[Tensor]:
    mesh, queue, learned = Mesh(tp=2), WeightGradientQueue(), weights()
    group = mesh.group("tp")
    leaf = own_range(draw(ROWS, LENGTH, WIDTH), group, 1).clone().requires_grad_()
    whole = gather_in(leaf, group, 1, LENGTH)
    queue.gathered.add(whole, leaf, Gather(group, 1, LENGTH))
    linear(whole.mul_(2), learned[0], None, queue).backward(draw(ROWS, LENGTH, 4, seed=9))
    with torch.no_grad():
        queue.run()
    return [weight.grad for weight in learned[:1] if weight.grad is not None]


def test_a_gathered_tensor_that_is_later_modified_in_place_is_kept(thread_ranks: Any) -> None:
    """The part is what it was before."""
    rows, read = draw(ROWS, LENGTH, 4, seed=9).flatten(0, 1), 2 * draw(ROWS, LENGTH, WIDTH).flatten(0, 1)
    for (gradient,) in thread_ranks.run(written_to_after_it_was_gathered, ranks=2):
        torch.testing.assert_close(gradient, rows.T @ read, rtol=1e-13, atol=1e-13)
