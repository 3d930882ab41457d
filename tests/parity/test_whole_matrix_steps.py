"""Steps of Muon and Owned: groups, refusals, gradients that overflow, parameters that others change."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

import plait
from parity.test_muon import muon
from parity.test_owned import owned_adafactor
from parity.whole_matrices import CASES, MUON, OTHERS
from parity.woven import shares, weave
from plait.engine import Engine
from plait.errors import PlanError
from plait.plan.plan import Plan

CASE = CASES["gpt2"]
FULL = Plan(dp=2, strategy="full", precision="fp64")
MAKE: dict[str, Any] = {"muon": muon, "adafactor": owned_adafactor}


def values(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in engine.named_parameters()}


def changed(before: dict[str, torch.Tensor], engine: Engine) -> set[str]:
    return {name for name, one in engine.named_parameters() if not torch.equal(before[name], one)}


class Coupled(torch.optim.Optimizer):
    """Divides all gradients by their common norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        for one in held:
            one.sub_(one.grad / norm, alpha=self.param_groups[0]["lr"])


def after_a_new_group(engine: Engine) -> None:
    first, *rest = engine.parameters()
    optimizer = plait.Muon(engine, [first])
    optimizer.add_param_group({"params": rest})
    optimizer.step()


def refusals() -> list[str]:
    engine = weave(CASE, FULL)
    first = next(iter(engine.parameters()))
    attempts = [
        partial(plait.Owned, Coupled, engine, lr=0.1),
        partial(plait.Owned, torch.optim.LBFGS, engine, lr=0.1),
        partial(plait.Owned, torch.optim.SGD, CASE.build(), lr=0.1),
        partial(plait.Muon, engine, [torch.nn.Parameter(torch.ones(2, 2))]),
        partial(plait.Muon, engine, lr=-1.0),
        partial(plait.Muon, engine, ns_coefficients=[(1.0, 2.0, 3.0)], ns_steps=2),
        partial(plait.Muon, engine, adjust_lr_fn="none"),
        partial(plait.Muon, engine, others={"beta": 0.9}),
        partial(plait.Muon, engine, others={"betas": 0.9}),
        partial(plait.Muon, engine, [{"params": [first], "betas": (0.8, 0.9), "use_muon": False}]),
        partial(plait.Muon, engine.parameters()),
        partial(plait.Muon, engine, engine.named_parameters()),
        partial(plait.Muon, engine, [{"lr": 0.1}]),
        partial(plait.Muon, engine, dtype="float64"),
        partial(plait.Owned, engine, torch.optim.SGD),
        partial(after_a_new_group, engine),
        partial(plait.Muon, engine, [first] if engine.mesh.rank else None),
        lambda: plait.reshard(engine, owned_adafactor(engine), Plan(dp=2, precision="fp64"), engine.mesh),
    ]
    told = []
    for attempt in attempts:
        with pytest.raises(PlanError) as refused:
            attempt()
        told.append(str(refused.value))
    return told


def test_what_muon_and_owned_cannot_do_is_refused_in_a_sentence(thread_ranks: Any) -> None:
    for told in thread_ranks.run(refusals, ranks=2):
        beginnings = [
            "Coupled updates a parameter by more than that parameter's own gradient and state, but with ",
            "LBFGS moves all parameters along one line, but with plait.Owned an optimizer has the parameters",
            "the engine of Owned(SGD) is an object of Sequential: give what plait.parallelize returns",
            "Muon was given a parameter [2, 2] that the engine does not have",
            "lr is -1.0: give a number of at least 0",
            "ns_coefficients is [(1.0, 2.0, 3.0)], and ns_steps 2: give one triple",
            "adjust_lr_fn is 'none': choose 'original' or 'match_rms_adamw'",
            "AdamW has no option beta: its options are lr, betas, eps, weight_decay",
            "betas of others is 0.9: give two numbers",
            "a group of Muon has betas, use_muon: it chooses the hidden matrices itself",
            "the engine of Muon is an object of generator: give what plait.parallelize returns",
            "a parameter of Muon is an object of tuple: give engine.parameters(), or a list of groups",
            "a parameter group has lr and no params",
            "dtype is 'float64': choose torch.bfloat16",
            "plait.Owned was given an object of Engine in place of an optimizer's class: give the class",
            "Muon was given a parameter [",
            "Muon has blocks.0.attention.key.bias on some ranks and not on rank 1, which holds it too",
            "plait.reshard does not move Owned, whose parameters have owners under the old plan: save",
        ]
        for sentence, beginning in zip(told, beginnings, strict=True):
            assert sentence.startswith(beginning)


def overflowed(kind: str) -> set[str]:
    """The parameters that a step changes whose gradients are not finite on one rank."""
    plan = Plan(dp=2, strategy="full", precision="fp16", master_precision="fp32")
    engine = weave(CASE, plan)
    optimizer = MAKE[kind](engine)
    before = values(engine)
    (batch,) = shares_in_single(engine)
    engine.forward_backward(*batch)
    gradient = next(one.grad for one in engine.parameters() if one.grad is not None and one.numel())
    if engine.mesh.rank == 1:
        gradient.fill_(torch.inf)
    scale = engine.loss_scale
    engine.step(optimizer, 1.0)
    assert engine.loss_scale == scale / 2
    lost = changed(before, engine)
    optimizer.zero_grad()
    engine.forward_backward(*batch)
    engine.step(optimizer, 1.0)
    assert changed(before, engine)
    return lost


def shares_in_single(engine: Engine) -> list[Any]:
    """One batch of a run in fewer bits."""
    inputs, targets = CASE.batches(4, 1, torch.float32)[0]
    rank = engine.mesh.index("dp")
    return [(inputs[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2])]


@pytest.mark.parametrize("kind", MAKE)
def test_gradients_that_overflow_on_one_rank_change_nothing_on_any(thread_ranks: Any, kind: str) -> None:
    assert thread_ranks.run(overflowed, kind, ranks=2) == [set(), set()]


def changed_by_others() -> None:
    engine = weave(CASE, FULL)
    optimizer = owned_adafactor(engine)
    (batch,) = shares(CASE, engine, 1)
    engine.forward_backward(*batch)
    saved = engine.state_dict(everywhere=True)
    engine.load_state_dict({name: torch.full_like(one, 0.25) for name, one in saved.items()})
    with pytest.raises(
        PlanError, match=r"^embedding\.\S+ was changed since the last step of Owned\(Adafactor\)"
    ):
        optimizer.step()
    optimizer.read_parameters()
    optimizer.step()
    for name, one in engine.named_parameters():
        assert torch.allclose(one, torch.full_like(one, 0.25), atol=0.02), name
    optimizer.step()


def test_owners_read_parameters_again_that_others_have_changed(thread_ranks: Any) -> None:
    thread_ranks.run(changed_by_others, ranks=2)


def groups_of_their_own() -> tuple[set[str], list[Any]]:
    """Which parameters two groups change, of which the first one's matrices have a rate of 0."""
    engine = weave(CASE, FULL)
    block = {name: one for name, one in engine.named_parameters() if name.startswith("blocks.0.")}
    rest = [one for name, one in engine.named_parameters() if name not in block and "norm" not in name]
    optimizer = plait.Muon(
        engine,
        [{"params": list(block.values()), "lr": 0.0}, {"params": rest, "others": {"lr": 0.0}}],
        **MUON,
        dtype=torch.float64,
        others=OTHERS,
    )
    before = values(engine)
    (batch,) = shares(CASE, engine, 1)
    loss = optimizer.step(lambda: engine.forward_backward(*batch))
    assert loss.item() > 0
    shapes = [(group["algorithm"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    return changed(before, engine), shapes


def test_groups_have_rates_of_their_own_and_parameters_outside_of_them_stay(thread_ranks: Any) -> None:
    ranks = thread_ranks.run(groups_of_their_own, ranks=2)
    names = set().union(*(names for names, _ in ranks))
    vectors = {f"blocks.0.attention.{one}.bias" for one in ("query", "key", "value", "output")}
    vectors |= {f"blocks.0.{one}" for one in ("mlp.up.bias", "mlp.down.bias")}
    vectors |= {f"blocks.0.{one}.norm.{part}" for one in ("attention", "mlp") for part in ("weight", "bias")}
    matrices = {f"blocks.1.attention.{one}.weight" for one in ("query", "key", "value", "output")}
    assert names == vectors | matrices | {"blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"}
    assert ranks[0][1] == [
        ("muon", 0.0, 0.1),
        ("adamw", 3e-3, 0.1),
        ("adamw", 3e-3, 0.0),
        ("muon", 1e-2, 0.1),
        ("adamw", 0.0, 0.1),
        ("adamw", 0.0, 0.0),
    ]


def sent_in_bf16() -> tuple[int, int, bool]:
    """Bytes of a step with masters in fp32, the elements of matrices, and whether copies are equal."""
    plan = Plan(dp=2, precision="bf16", master_precision="fp32")
    engine = weave(CASE, plan)
    optimizer = plait.Muon(engine, **MUON, others=OTHERS)
    (batch,) = shares_in_single(engine)
    engine.forward_backward(*batch)
    before = engine.mesh.traffic.snapshot()
    optimizer.step()
    counts = engine.mesh.traffic.since(before)
    engine.check_replicas(optimizer)
    sent = sum(count.bytes for kinds in counts.values() for count in kinds.values())
    states = {one.dtype for state in optimizer.state.values() for one in state.values()}
    return sent, sum(part.box.numel for part in optimizer.owned.parts), states == {torch.float32}


def test_matrices_travel_in_the_dtype_of_the_iterations_if_it_is_narrower(thread_ranks: Any) -> None:
    """Of copies each owner has all of its matrices already, and gives each once to the other rank."""
    ranks = thread_ranks.run(sent_in_bf16, ranks=2)
    assert sum(sent for sent, _, _ in ranks) == 2 * ranks[0][1]
    assert all(single for *_, single in ranks)


def stepped_by_torch(kind: str) -> None:
    """A state dict of torch's kind, loaded on the same rank, goes on with the same bits."""
    engine = weave(CASE, FULL)
    optimizer = MAKE[kind](engine)
    batches = shares(CASE, engine, 2)
    engine.forward_backward(*batches[0])
    optimizer.step()
    optimizer.zero_grad()
    start, state = values(engine), copy.deepcopy(optimizer.state_dict())
    engine.forward_backward(*batches[1])
    optimizer.step()
    end = values(engine)
    with torch.no_grad():
        for name, one in engine.named_parameters():
            one.copy_(start[name])
    other = MAKE[kind](engine)
    other.load_state_dict(state)
    other.step()
    assert not changed(end, engine)


@pytest.mark.parametrize("kind", MAKE)
def test_a_state_dict_of_torchs_kind_goes_on_with_the_same_bits(thread_ranks: Any, kind: str) -> None:
    thread_ranks.run(stepped_by_torch, kind, ranks=2)
