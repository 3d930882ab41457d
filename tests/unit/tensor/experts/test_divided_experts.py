"""Experts that are divided over ranks give what the plain loop gives, in every division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from divided_cases import Division, Trial, check, divided
from expert_cases import ADAPTED, CASES, Answer, Case, answer
from torch import Tensor, nn
from torch.nn.utils import parametrize

from parity.live_bytes import LiveBytes
from plait.errors import PlanError
from plait.estimate.memory.operation_recorder import group_on_meta
from plait.estimate.memory.storage_tracker import StorageTracker
from plait.models.huggingface.mixture import Mixture
from plait.plan.layout import divide
from plait.plan.layout.layout import Replicate
from plait.plan.layout.shards import shard
from plait.plan.plan import Recompute
from plait.ranks.group import Count, alone
from plait.ranks.mesh import GridMesh
from plait.tensor.autograd.deferred_weight_gradients import defer_weight_gradients
from plait.tensor.autograd.weight_gradient_queue import (
    INPUT_ONLY,
    WEIGHTS_NEXT,
    BackwardMode,
    WeightGradientQueue,
)
from plait.tensor.experts.expert_layouts import expert_layouts
from plait.tensor.experts.experts import ExpertRanks, Experts
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.token_exchange import exchange_of

DIVISIONS = [
    Division(ep=2),
    Division(ep=4),
    Division(ep=2, etp=2),
    Division(etp=2),
    Division(ep=2, edp=2),
    Division(ep=2, tokens=2),
    Division(ep=4, tokens=2),
    Division(ep=4, tokens=4),
    Division(ep=2, etp=2, tokens=4),
    Division(edp=2, ep=2, tokens=4),
    Division(edp=2, tokens=2),
]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize("experts", [3, 5, 6, 8])
@pytest.mark.parametrize("top_k", [1, 2])
def test_outputs_and_gradients_are_those_of_the_plain_loop(
    thread_ranks: Any, division: Division, experts: int, top_k: int
) -> None:
    check(thread_ranks, Trial(Case(experts=experts, top_k=top_k), division))


@pytest.mark.parametrize("division", [Division(ep=4), Division(ep=2, etp=2), Division(ep=2, etp=2, tokens=2)])
@pytest.mark.parametrize("name", [*(name for name in CASES if name != "odd sizes"), "few tokens"])
def test_every_kind_of_expert_and_routing_can_be_divided(
    thread_ranks: Any, division: Division, name: str
) -> None:
    """Of few tokens the last ranks have none; with one expert of three the last rank has no expert."""
    check(thread_ranks, Trial(CASES.get(name, Case(tokens=7)), division))


@pytest.mark.parametrize(
    "division", [Division(ep=4), Division(ep=2, tokens=2), Division(ep=2, etp=2, tokens=2)], ids=str
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["adapters", "adapters of gpt-oss"])
def test_adapters_are_divided_with_their_experts(
    thread_ranks: Any, division: Division, recompute: Recompute, name: str
) -> None:
    trial = Trial(ADAPTED[name], division, recompute)
    check(thread_ranks, trial)
    check(thread_ranks, replace(trial, deferred=True))


def test_etp_divides_the_wide_half_of_an_adapter_and_copies_the_other() -> None:
    layouts = expert_layouts(ADAPTED["adapters"].layer(), {"ep": 2, "etp": 2}, "mlp")
    copied = {name for name, one in layouts.items() if one.axis_placements.get("etp") in (None, Replicate())}
    assert copied == Experts.summed_over_etp == {"gate_up_proj_adapter.down", "down_proj_adapter.up"}


def test_computed_parameters_are_not_divided() -> None:
    layer = CASES["plain"].layer()
    parametrize.register_parametrization(layer, "down_proj", nn.Identity())
    text = r"^mlp.parametrizations.down_proj.original is no parameter that experts have by themselves"
    with pytest.raises(PlanError, match=text):
        expert_layouts(layer, {"ep": 2, "etp": 1}, "mlp")
    assert expert_layouts(layer, {"tp": 2}, "mlp")


def test_odd_sizes_can_be_divided(thread_ranks: Any) -> None:
    check(thread_ranks, Trial(CASES["odd sizes"], Division(ep=4)))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("division", [Division(ep=2), Division(ep=2, etp=2, tokens=4)], ids=str)
def test_weight_gradients_are_computed_while_gradients_travel(
    thread_ranks: Any, division: Division, recompute: Recompute
) -> None:
    trial = Trial(CASES["gpt-oss"], division, recompute, deferred=True)
    check(thread_ranks, trial)
    check(thread_ranks, replace(trial, deferred=False))


@pytest.mark.parametrize(("recompute", "times"), [("none", 4), ("selective", 4), ("full", 5)])
def test_recomputation_counts_no_rows_again_and_sends_tokens_again_only_if_it_keeps_nothing(
    thread_ranks: Any, recompute: Recompute, times: int
) -> None:
    for traffic in check(thread_ranks, Trial(Case(), Division(ep=2), recompute, deferred=True)):
        assert {kind: count.calls for kind, count in traffic["ep"].items()} == {
            "all_gather": 1,
            "all_to_all": times,
        }


class ObservedQueue(WeightGradientQueue):
    """Notes how many weight gradients were pending whenever they might be computed during a collective."""

    def __init__(self, mode: BackwardMode) -> None:
        super().__init__(mode=mode)
        self.seen: list[int] = []

    def overlap(self) -> None:
        self.seen.append(len(self.pending))
        super().overlap()


def pending_of_a_rank(mode: BackwardMode) -> tuple[list[int], int]:
    """With one weight gradient of another layer in the queue."""
    trial, queue = Trial(Case(), Division(ep=2)), ObservedQueue(mode)
    layer, mesh = divided(trial)
    defer_weight_gradients(layer, queue)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    queue.add(lambda: None)
    answer(layer, layer, trial.inputs(mesh.rank), trial.gradient(mesh.rank))
    return queue.seen, len(queue.take())


def test_queued_weight_gradients_are_computed_while_gradients_travel_unless_w_follows_later(
    thread_ranks: Any,
) -> None:
    """First those of other layers, then, while gradients of the tokens travel back, the layer's own two."""
    assert thread_ranks.run(pending_of_a_rank, WEIGHTS_NEXT, ranks=2) == [([1, 2], 0)] * 2
    assert thread_ranks.run(pending_of_a_rank, INPUT_ONLY, ranks=2) == [([1, 3], 3)] * 2


def run_beside(trial: Trial) -> bool:
    """Whether `start` and its result have the bits of one call."""
    layer, mesh = divided(trial)
    given = trial.inputs(mesh.rank)
    finish = layer.start(*given)
    return torch.equal(finish(), layer(*given))


def test_other_layers_may_run_while_tokens_travel(thread_ranks: Any) -> None:
    assert all(thread_ranks.run(run_beside, Trial(Case(), Division(ep=2)), ranks=2))


def order_of_a_rank(make: Callable[[], nn.Module], hooked: bool) -> list[str]:
    """When a mixture with a shared expert computes its parts: after how many all-to-alls were started."""
    mesh, layer = GridMesh(ep=2), make()
    (experts,) = (one for one in layer.modules() if isinstance(one, Experts))
    for name, layout in expert_layouts(experts, {"ep": 2, "etp": 1}, "").items():
        parameter = getattr(experts, name)
        parameter.data = shard(parameter.detach(), layout, (mesh.rank, 0))
    experts.ranks = ExpertRanks(mesh.group("ep"), 1, alone("tp"))
    order: list[str] = []

    def note(name: str, *_: object) -> None:
        sent = mesh.traffic.snapshot().get("ep", {})
        order.append(f"{name} after {sent['all_to_all'].calls if sent else 0}")

    shared = next(one for name, one in layer.named_modules() if name in ("shared", "shared_expert"))
    shared.register_forward_hook(partial(note, "shared"))
    if hooked:
        experts.register_forward_hook(partial(note, "experts"))
    layer(torch.randn(2, 5, 12))
    return order


def of_plait() -> nn.Module:
    return MixtureOfExperts(12, 10, experts=4, top_k=2, shared=6)


def of_transformers() -> nn.Module:
    models = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    sizes = {"hidden_size": 12, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 6}
    block = models.Qwen2MoeSparseMoeBlock(models.Qwen2MoeConfig(**sizes, num_experts=4))
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return Mixture(block, "softmax")


@pytest.mark.parametrize("make", [of_plait, of_transformers])
def test_shared_experts_run_while_tokens_travel(thread_ranks: Any, make: Callable[[], nn.Module]) -> None:
    """Tokens have been sent, and results have not. Hooks of the experts see one call, after that."""
    assert thread_ranks.run(order_of_a_rank, make, False, ranks=2) == [["shared after 1"]] * 2
    hooked = thread_ranks.run(order_of_a_rank, make, True, ranks=2)
    assert hooked == [["shared after 0", "experts after 2"]] * 2


def rounded_of_a_rank(trial: Trial) -> Answer:
    layer, mesh = divided(trial)
    return answer(layer, layer, trial.inputs(mesh.rank), trial.gradient(mesh.rank))


@pytest.mark.parametrize("wide_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_travel_bit_by_bit(thread_ranks: Any, dtype: torch.dtype, wide_weights: bool) -> None:
    """With two experts a token sums are of two numbers, in whatever order: the bits are those of one rank."""
    trial = Trial(NarrowCase(experts=6, dtype=dtype, wide_weights=wide_weights), Division(ep=2))
    found = thread_ranks.run(rounded_of_a_rank, trial, ranks=2)
    for source, got in enumerate(found):
        layer = trial.case.layer()
        one = answer(layer, layer, trial.inputs(source), trial.gradient(source))
        assert got.of_weights.dtype == trial.inputs(source)[2].dtype
        for name in ("output", "of_hidden", "of_weights"):
            assert torch.equal(getattr(got, name), getattr(one, name)), name


@dataclass(frozen=True)
class NarrowCase(Case):
    wide_weights: bool = False
    """Whether the weights of the router are float32."""

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        hidden, indices, weights = super().inputs(seed)
        return hidden, indices, weights.float() if self.wide_weights else weights


def assumed_of_a_rank(trial: Trial) -> list[tuple[str, int]]:
    """The collectives of a run on the meta device."""
    layer, mesh = divided(trial)
    assert layer.ranks is not None
    skipped: list[tuple[str, int]] = []
    group = replace(mesh.group("ep"), on_skip=lambda _, kind, tensor: skipped.append((kind, tensor.nbytes)))
    layer.to("meta").ranks = replace(layer.ranks, group=group)
    hidden, indices, weights = (one.to("meta") for one in trial.inputs(0))
    output = layer(hidden.requires_grad_(), indices, weights.requires_grad_())
    output.backward(torch.empty_like(output))
    assert output.shape == hidden.shape
    assert all(one.grad is not None for one in (hidden, weights, *layer.parameters()))
    return skipped


def test_on_meta_uniform_routing_is_assumed_and_nothing_is_sent(thread_ranks: Any) -> None:
    """Of 28 tokens with 2 of 8 experts 22 go to each of 2 ranks: 28 · (1 - 6 / 28)."""
    trial = Trial(Case(tokens=28, experts=8), Division(ep=2))
    hidden = trial.case.hidden
    rows = [hidden + 4, hidden, hidden, hidden + 2]  # tokens, results, and the gradients of both
    expected = [("all_gather", 8 * 10), *(("all_to_all", 8 * 44 * width) for width in rows)]
    assert thread_ranks.run(assumed_of_a_rank, trial, ranks=2) == [expected] * 2


def test_on_meta_what_is_sent_is_kept_until_it_has_arrived() -> None:
    """So that an estimate counts it as long as a run does."""
    group = group_on_meta("ep_etp", 2, 0, None)
    tracker = StorageTracker()
    with tracker.tracking():
        indices, tokens = torch.zeros(12, 2, dtype=torch.int64), torch.zeros(12, 3)
        exchange = exchange_of(indices, 4, group, 1)
        known = sum(tracker.sizes[one] for one in tracker.live())
        pending = exchange.start(tokens)
        travelling, received = sum(tracker.sizes[one] for one in tracker.live()) - known, pending()
        arrived = sum(tracker.sizes[one] for one in tracker.live()) - known
    assert (travelling, arrived) == (2 * received.nbytes, received.nbytes)


@pytest.mark.parametrize(
    ("top_k", "sent"), [(1, (12, 0, 0, 0)), (2, (12, 0, 0, 0)), (3, (12, 12, 0, 0)), (5, (12, 12, 12, 0))]
)
def test_on_meta_a_rank_may_take_all_tokens(top_k: int, sent: tuple[int, ...]) -> None:
    """Of eight experts two on each of four ranks: the first are the first rank's, then those of the next."""
    indices = torch.empty(12, top_k, dtype=torch.int64, device="meta")
    counts = exchange_of(indices, 8, group_on_meta("ep_etp", 4, 0, None), 1, takes_all=True).counts
    assert (counts.sent, counts.received, counts.most_received) == (sent, (12,) * 4, 48)
    assert sum(counts.of_experts) == 48 * min(top_k, 2)


def kept_by_a_rank(trial: Trial) -> tuple[int, int, int]:
    """The bytes that a call keeps for its backward, and of how many rows sent, and rows received."""
    layer, mesh = divided(trial)
    hidden, indices, weights = trial.inputs(mesh.rank)
    hidden, weights = hidden.requires_grad_(), weights.requires_grad_()
    with LiveBytes() as live:
        total = sum(one.sum() for one in (hidden, indices, weights, *layer.parameters()))
        del total
        before = live.settled()
        output = layer(hidden, indices, weights)
        kept = live.settled() - before - output.nbytes
    rows = rows_between(trial).items()
    sent = sum(count for (source, _), count in rows if source == mesh.rank)
    return kept, sent, sum(count for (_, target), count in rows if target == mesh.rank)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_call_keeps_the_tokens_received_the_rows_of_gate_and_up_and_small_numbers(
    rank_pool: Any, ep: int
) -> None:
    """Of int32: three per pair, for its token, place and order; two per row sent, one a token and expert."""
    trial = Trial(Case(tokens=64, experts=8, top_k=2), Division(ep=ep, edp=2 // ep), uneven=False)
    case = trial.case
    found = rank_pool.run(kept_by_a_rank, trial, ranks=2)
    pairs = 2 * case.tokens * case.top_k
    if ep == 1:
        here = 8 * case.tokens * case.top_k * 2 * case.inner
        numbers = 4 * (3 * case.tokens * case.top_k + case.tokens + case.experts)
        assert [kept for kept, *_ in found] == [here + numbers] * 2
        return
    received = sum(rows for *_, rows in found)
    width = (
        case.hidden + 3 * case.top_k
    )  # packed with numbers and weights of experts, and the weights once more
    total = 8 * (received * width + pairs * 2 * case.inner)
    total += 4 * (3 * pairs + received + case.experts)
    total += 4 * (2 * sum(sent for _, sent, _ in found) + 2 * case.tokens)
    assert sum(kept for kept, *_ in found) == total


def test_ranks_as_processes_give_what_the_plain_loop_gives(rank_pool: Any) -> None:
    check(rank_pool, Trial(Case(experts=6, top_k=2), Division(ep=2, etp=2, tokens=2), deferred=True))


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("division", [Division(ep=2), Division(ep=4), Division(ep=2, etp=2)], ids=str)
def test_traffic_is_what_the_indices_say(thread_ranks: Any, division: Division, top_k: int) -> None:
    """A token travels once to each other rank that has experts of it, and one row comes back from each."""
    trial = Trial(Case(tokens=19, experts=8, top_k=top_k), division)
    rows = rows_between(trial)
    for rank, traffic in enumerate(check(thread_ranks, trial)):
        sent = sum(count for (source, target), count in rows.items() if source == rank != target)
        received = sum(count for (source, target), count in rows.items() if target == rank != source)
        hidden = trial.case.hidden
        there = sent * (hidden + 2 * top_k) + received * hidden  # with weights and numbers, of 8 bytes each
        back = sent * hidden + received * (hidden + top_k)
        assert traffic["ep"] == {
            "all_gather": Count(1, 8 * (division.ep + trial.case.experts)),
            "all_to_all": Count(4, 8 * (there + back)),
        }


def rows_between(trial: Trial) -> dict[tuple[int, int], int]:
    """How many rows each rank sends to each."""
    division, experts = trial.division, trial.case.experts
    holders = [part for part, own in enumerate(divide(experts, division.ep)) for _ in own]
    rows: dict[tuple[int, int], int] = {}
    for source in range(division.ranks):
        for numbers in trial.inputs(source)[1].tolist():
            for part in {holders[number] for number in numbers}:
                for target in range(part * division.etp, (part + 1) * division.etp):
                    rows[source, target] = rows.get((source, target), 0) + 1
    return rows
