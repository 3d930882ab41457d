"""`plait.dpo_loss` is the formula written out, pair by pair on one rank, under every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.norm import TOLERANCE, assert_close, assert_equal
from plait.errors import ConfigError, DataError
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor import answer_log_probs, preference_batch
from plait.tensor.microbatches import split

VOCAB, LENGTH, PAIRS = 12, 40, 4
BETA, SMOOTH = 0.3, 0.1
PLANS = {
    "cp tp": {"cp": 2, "tp": 2, "microbatches": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2, "microbatches": 2},
    "dp": {"dp": 2, "strategy": "full"},
    "one": {"microbatches": 2},
    "pp dp": {"pp": 2, "dp": 2, "schedule": "zb-h1"},
}
FORMS: dict[str, dict[str, Any]] = {
    "a row": {},
    "packed": {"pairs": 2},
    "apart": {"apart": True},
}


def preferences() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Pairs of unequal lengths."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(3, 4, 2), (1, 1, 5), (2, 3, 3), (4, 2, 6)]
    return [tuple(torch.randint(VOCAB, (n,), generator=draw) for n in each) for each in sizes]  # type: ignore[misc]


def model() -> nn.Sequential:
    return plait.models.llama(layers=2, hidden=16, heads=4, vocab=VOCAB, context=LENGTH)


def plain() -> nn.Sequential:
    """The same model with the values of seed 0, on one rank."""
    engine = plait.parallelize(
        model(), Plan(precision="fp64"), plait.Mesh(Plan(), alone=True), plait.cross_entropy
    )
    made = model().to_empty(device="cpu").double()
    made.load_state_dict(engine.state_dict(everywhere=True))
    return made


def log_prob(layers: nn.Sequential, prompt: Tensor, answer: Tensor) -> Tensor:
    """The log-probabilities of the tokens of an answer, from its text alone."""
    whole = torch.cat([prompt, answer])
    each = layers(whole[None, :-1])[0].log_softmax(-1)[len(prompt) - 1 :]
    return each.gather(1, answer[:, None])[:, 0]


def written_out(average: bool) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of equation 7 with label smoothing, and every gradient."""
    layers, losses = plain(), []
    for number, (prompt, chosen, rejected) in enumerate(preferences()):
        margin = torch.zeros((), dtype=torch.float64)
        for sign, answer in ((1, chosen), (-1, rejected)):
            ratios = log_prob(layers, prompt, answer) - reference(number, sign, len(answer))
            margin = margin + sign * BETA * (ratios.mean() if average else ratios.sum())
        smooth = -SMOOTH * torch.log(1 / (1 + torch.exp(margin)))
        losses.append(-(1 - SMOOTH) * torch.log(1 / (1 + torch.exp(-margin))) + smooth)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: one.grad for name, one in layers.named_parameters() if one.grad is not None}


def reference(number: int, sign: int, length: int) -> Tensor:
    """Log-probabilities of a reference that is another model."""
    return -2.0 - 0.1 * sign - torch.arange(length, dtype=torch.float64) / (number + 3)


def batch(form: str) -> tuple[Any, dict[str, Tensor]]:
    """All pairs in a form, with the reference's log-probabilities."""
    given = [
        (prompt, *answers, *(reference(number, 1 - 2 * side, len(one)) for side, one in enumerate(answers)))
        for number, (prompt, *answers) in enumerate(preferences())
    ]
    return preference_batch(given, LENGTH, **FORMS[form])


def on_ranks(name: str, form: str, average: bool) -> tuple[float, dict[str, Tensor]]:
    loss = plait.dpo_loss(BETA, label_smoothing=SMOOTH, average=average, **FORMS[form])
    plan = Plan(precision="fp64", **PLANS[name])
    mesh = plait.Mesh(plan)
    engine = plait.parallelize(model(), plan, mesh, loss)
    share = split(batch(form), mesh.size("dp"), "batch")[mesh.index("dp")]
    mean = engine.forward_backward(*share).item()
    assert engine.loss_weight() == PAIRS
    return mean, dict(engine.named_gradients())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.quick_cases(3)
def test_the_preference_loss_is_its_formula_written_out(thread_ranks: RankPool, name: str, form: str) -> None:
    average = form == "packed"
    loss, gradients = written_out(average)
    world = Plan(**PLANS[name]).world
    for mean, found in thread_ranks.run(on_ranks, name, form, average, ranks=world):
        assert_close(mean, loss, TOLERANCE[torch.float64], f"{name}, {form}")
        assert_equal(found, gradients, TOLERANCE[torch.float64], f"{name}, {form}")


def on_its_reference(form: str) -> tuple[float, list[float]]:
    """The loss and the margins of a model whose reference is itself."""
    loss, plan = plait.dpo_loss(**FORMS[form]), Plan(tp=2, precision="fp64")
    engine = plait.parallelize(plait.lora(model(), rank=2), plan, plait.Mesh(plan), loss)
    inputs, targets = preference_batch(preferences(), LENGTH, **FORMS[form])
    found = answer_log_probs(engine.output(inputs), targets)
    given = [(*pair, *both) for pair, both in zip(preferences(), found, strict=True)]
    inputs, targets = preference_batch(given, LENGTH, **FORMS[form])
    return engine.evaluate(inputs, targets).item(), loss.margins(engine.output(inputs), targets).tolist()


@pytest.mark.parametrize(
    "form", ["a row", *(pytest.param(one, marks=pytest.mark.full) for one in ("packed", "apart"))]
)
def test_the_preference_loss_of_a_model_against_itself_has_margins_of_zero(
    thread_ranks: RankPool, form: str
) -> None:
    for loss, margins in thread_ranks.run(on_its_reference, form, ranks=2):
        assert loss == pytest.approx(math.log(2), abs=1e-12)
        assert margins == pytest.approx([0.0] * PAIRS, abs=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("form", ["a row", "apart"])
def test_verify_finds_the_preference_loss_equal_over_cp_and_dp(form: str) -> None:
    inputs, targets = batch(form)
    loss = plait.dpo_loss(BETA, **FORMS[form])
    plan = Plan(cp=2, dp=2, microbatches=1)
    verdict = plait.verify(model, plan, inputs, targets, loss=loss, ranks_as="threads")
    assert verdict.equal, verdict


BAD_PAIRS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "long": (
        [([1] * 30, [2], [3] * 20)],
        {},
        "pair 0 has a prompt of 30 tokens and an answer of 20, and needs 79",
    ),
    "no prompt": ([([], [2], [3])], {}, "a prompt of 0 tokens"),
    "no answer": ([([1], [2], [])], {}, "an answer of 0"),
    "nothing": ([], {}, "given no pairs"),
    "no list": (7, {}, r"give a list of \(prompt, chosen, rejected\)"),
    "two sequences": ([([1], [2])], {}, "pair 0 is 2 sequences, of 1, 1: give a prompt, a chosen and a rej"),
    "short reference": ([([1], [2], [3, 3], [0.0], [0.0])], {}, "pair 0 is 5 sequences"),
    "text": ([("a", "b", "c")], {}, "sequence 0 of pair 0 is an object of str, and no list of numbers"),
    "names": ([{"prompt": [1], "chosen": [2], "rejected": [3]}], {}, "pair 0 is an object of dict: give a"),
    "fractions": ([([1.5], [2], [3])], {}, "tokens that are not all whole numbers from 0"),
    "no target": ([([1], [-100], [3])], {}, "tokens that are not all whole numbers from 0"),
    "losses": ([([1], [2], [3], [3.0], [2.0])], {}, "no log-probabilities, at most 0"),
    "some": ([([1], [2], [3], [-1.0], [-1.0]), ([1], [2], [3])], {}, "pair 1 has no reference, unlike"),
    "both": ([([1], [2], [3])], {"apart": True, "pairs": 2}, "apart and pairs > 1"),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_pairs_that_fit_no_row_are_refused(case: str) -> None:
    given, options, message = BAD_PAIRS[case]
    with pytest.raises(DataError, match=message):
        preference_batch(given, LENGTH, **options)


def test_targets_and_options_that_mean_something_else_are_refused() -> None:
    packed, apart = (batch(form)[1] for form in ("packed", "apart"))
    with pytest.raises(DataError, match="a row holds 2 pairs, and the loss takes 1"):
        plait.dpo_loss().weight(packed)
    with pytest.raises(DataError, match="a micro-batch has 3 rows, and two consecutive rows are a pair"):
        plait.dpo_loss(apart=True).weight({name: one[:3] for name, one in apart.items()})
    for loss, form in ((plait.dpo_loss(), "apart"), (plait.dpo_loss(apart=True), "a row")):
        targets = batch(form)[1]
        with pytest.raises(DataError, match="answers of a batch are not in the pairs that the loss takes"):
            loss.total(torch.zeros(*targets["tokens"].shape, VOCAB), targets)
    with pytest.raises(DataError, match="the targets of dpo_loss are Tensor: give those of"):
        plait.dpo_loss().weight(packed["tokens"])  # type: ignore[arg-type]
    for given in ({"beta": 0}, {"beta": "1"}, {"label_smoothing": 0.5}, {"average": 1}, {"pairs": 0}):
        with pytest.raises(ConfigError, match=f"dpo_loss's {next(iter(given))} is"):
            plait.dpo_loss(**given)  # type: ignore[arg-type]
