"""Float8 linears: one rank has torchao's numbers, and every layout those of one rank with its micro-batches.

Sums of float8 products in fp32 depend on their order, and a value at the border between two numbers of eight
bits then falls on either side. In fp64 products are summed in fp64, and such values are too few to be met.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import woven
from parity.case import Case, Recipe
from parity.cases import GPT2_CONTEXT, GPT2_VOCAB, draw_contexts, gpt2
from parity.pairs import covering_rows
from parity.parity import TWO_STEPS, compare
from parity.rows import name_of
from plait.checkpoint.compatibility import linears_change
from plait.models.llama import RULES
from plait.plan.plan import Plan
from plait.plan.rules import column, row, sequence
from plait.tensor.autograd import float8_inputs, float8_linear, float8_operands, traced_float8_linear
from plait.tensor.float8.cast import factor_of
from plait.tensor.float8.recipes import RECIPES, CastFormat

OF_TORCHAO = {
    "float8": "tensorwise",
    "float8-rowwise": "rowwise",
    "float8-rowwise-gw": "rowwise_with_gw_hp",
}


def chain() -> nn.Sequential:
    """Linears with and without bias, of which the last stays in the run's precision."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False), nn.Tanh(), nn.Linear(32, 10)
    )


@pytest.mark.parametrize("recipe", tuple(RECIPES))
def test_one_rank_has_the_loss_and_gradients_of_torchao_bit_by_bit_in_bf16(recipe: Any) -> None:
    float8 = pytest.importorskip("torchao.float8")
    theirs = chain().bfloat16()
    config = float8.Float8LinearConfig.from_recipe_name(OF_TORCHAO[recipe])
    float8.convert_to_float8_training(theirs, config=config, module_filter_fn=lambda _, name: name != "4")
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 6, 64, generator=draw).bfloat16()
    targets = torch.randint(10, (4, 6), generator=draw)
    expected = functional.cross_entropy(theirs(inputs).float().flatten(0, 1), targets.flatten())
    expected.backward()
    plan = Plan(precision="bf16", gradient_precision="bf16", linears=recipe)
    engine = plait.parallelize(chain(), plan, plait.Mesh(plan), plait.cross_entropy)
    of_step = engine.forward_backward(inputs, targets)
    torch.testing.assert_close(of_step.float(), expected)  # the mean is taken in another way
    gradients = {name: one.grad for name, one in theirs.named_parameters()}
    for name, gradient in engine.named_gradients():
        assert torch.equal(gradient.bfloat16(), gradients[name]), name
    assert engine.evaluate(inputs, targets) == of_step


@cache
def llama() -> Case:
    """A small Llama whose linears multiply in float8, also divided between two ranks."""

    def build() -> nn.Module:
        sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "inner": 128}
        return plait.models.llama(layers=2, vocab=GPT2_VOCAB, context=GPT2_CONTEXT, **sizes)

    return Case("llama", build, draw_contexts(GPT2_VOCAB))


def gpt() -> Case:
    """A small GPT-2 likewise, for up to four ranks."""
    return gpt2(hidden=64, heads=4, tied=False)


@cache
def adapted() -> Case:
    """That Llama with adapters, which stay in the run's precision beside frozen linears in float8."""

    def build() -> nn.Module:
        return plait.lora(llama().build(), rank=4, targets=["*.query", "*.output", "*.up"])

    return Case("adapted", build, draw_contexts(GPT2_VOCAB))


FAMILIES = {"gpt2": gpt, "llama": llama, "adapted": adapted}
FACTORS = {
    "family": tuple(FAMILIES),
    "linears": tuple(RECIPES),
    "tp": (1, 2, 4),
    "cp": (1, 2),
    "sequence_parallel": ("none", "keep", "regather"),
    "pipeline": ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1")),
    "data": ((1, "none", "last"), (2, "none", "last"), (2, "full", "each")),
    "recompute": ("none", "selective", "full"),
    "compile": (False, "graphs"),
}
"""`data`: dp, strategy and reduce."""


def fits(row: dict[str, Any]) -> bool:
    """On eight ranks; Llama has two heads of keys and values."""
    ranks = row.get("pipeline", (1,))[0] * row.get("data", (1,))[0] * row.get("tp", 1) * row.get("cp", 1)
    divided = row.get("tp", 4) > 1 or row.get("sequence_parallel", "none") == "none"
    return ranks <= 8 and divided and not (row.get("family", "gpt2") != "gpt2" and row.get("tp", 1) == 4)


def check(thread_ranks: Any, case: Case, plan: Plan, recipe: Recipe = TWO_STEPS) -> None:
    """Compare a run with one rank's that has the same micro-batches."""
    alone = Plan(precision="fp64", linears=plan.linears, microbatches=plan.dp * plan.microbatches)
    (expected,) = thread_ranks.run(woven.train, case, alone, recipe, ranks=1)
    compare(thread_ranks.run(woven.train, case, plan, recipe, ranks=plan.world), expected, torch.float64)


@pytest.mark.parametrize("row", covering_rows(FACTORS, fits), ids=name_of)
def test_every_layout_equals_one_rank_for_every_pair_of_factors(
    thread_ranks: Any, row: dict[str, Any]
) -> None:
    fields = dict(row)
    case = FAMILIES[fields.pop("family")]()
    (pp, schedule), (dp, strategy, reduce) = fields.pop("pipeline"), fields.pop("data")
    fields |= {"pp": pp, "schedule": schedule, "dp": dp, "strategy": strategy, "reduce": reduce}
    check(thread_ranks, case, Plan(**fields, microbatches=2, precision="fp64"))


class PostNorm(nn.Module):
    """An MLP whose norm comes last, and saves what the row-parallel linear returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        result: Tensor = x + self.norm(self.down(functional.gelu(self.up(x))))
        return result


def post_norm() -> Case:
    """Layers that run on parts of the sequence."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(GPT2_VOCAB, 32), PostNorm(), PostNorm(), nn.Linear(32, GPT2_VOCAB))
        model.rules = {"*.up": column, "*.down": row, "1": sequence.along(1), "2": sequence.along(1)}  # type: ignore[assignment]
        return model.double()

    return Case("post_norm", build, draw_contexts(GPT2_VOCAB))


@pytest.mark.parametrize("mode", ["keep", "regather"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("recipe", ["float8", "float8-rowwise"])
def test_a_layer_that_reads_a_row_parallel_output_again_equals_one_rank(
    thread_ranks: Any, recipe: Any, recompute: Any, mode: Any
) -> None:
    """And whose tokens have unlike scales, since no norm is before the region."""
    fields = {"tp": 2, "sequence_parallel": mode, "recompute": recompute, "linears": recipe}
    check(thread_ranks, post_norm(), Plan(**fields, precision="fp64"))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", tuple(RECIPES))
def test_a_pipeline_in_bf16_has_the_bits_of_one_rank(thread_ranks: Any, recipe: Any) -> None:
    """Nothing is summed in another order: products of a micro-batch are those of one rank."""
    plans = Plan(microbatches=3), Plan(microbatches=3, pp=2, schedule="zb-h1", recompute="selective")
    found = [
        thread_ranks.run(bits_of_gradients, replace(plan, linears=recipe, precision="bf16"), ranks=plan.world)
        for plan in plans
    ]
    together = {name: bits for rank in found[1] for name, bits in rank.items()}
    assert together.keys() == found[0][0].keys()
    for name, bits in found[0][0].items():
        assert torch.equal(bits, together[name]), name


def bits_of_gradients(plan: Plan) -> dict[str, Tensor]:
    """The gradients of one batch of tokens."""
    case = llama()
    engine = woven.weave(case, plan)
    ((inputs, targets),) = case.batches(2 * plan.microbatches, 1, torch.float32)
    engine.forward_backward(inputs, targets)
    return {name: gradient.clone() for name, gradient in engine.named_gradients()}


@pytest.mark.parametrize(
    ("recipe", "sequence_parallel", "compiled"),
    [
        ("float8", "keep", False),
        ("float8-rowwise", "none", False),
        ("float8", "none", "graphs"),
        ("float8", "none", False),
    ],
)
def test_tp_sums_in_fp32_what_one_rank_rounds_once(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, recipe: Any, sequence_parallel: Any, compiled: Any
) -> None:
    """In bf16: of summands that were rounded first, half of all sums would differ. The head is whole."""
    plan = Plan(linears=recipe, precision="bf16", compile=compiled)
    over_tp = replace(plan, tp=2, sequence_parallel=sequence_parallel)
    (expected,) = thread_ranks.run(output_and_first_gradient, plan, ranks=1)

    def differing() -> list[float]:
        found, _ = thread_ranks.run(output_and_first_gradient, over_tp, ranks=2)
        return [float((one != other).double().mean()) for one, other in zip(found, expected, strict=True)]

    assert max(differing()) < 0.05
    for module in (float8_inputs, float8_linear, traced_float8_linear):
        monkeypatch.setattr(module, "wide", lambda dtype: dtype)
    assert min(differing()) > 0.3


def output_and_first_gradient(plan: Plan) -> tuple[Tensor, Tensor]:
    """The output for a batch, and the gradient of the embedding, to which all layers have added."""
    case, inside = llama(), ("embedding.", "head.", "head")
    rules = {path: rule for path, rule in RULES.items() if not path.startswith(inside)}
    engine = plait.parallelize(case.build(), plan, plait.Mesh(plan), case.loss, rules=rules, seed=3)
    ((inputs, targets),) = case.batches(4, 1, torch.float32)
    engine.forward_backward(inputs, targets)
    output = engine.output(inputs)
    assert isinstance(output, Tensor)
    return output, dict(engine.named_gradients())["embedding.token.weight"].clone()


class Factors:
    """Records the factors by which each rank casts, in order; ranks are threads."""

    def __init__(self) -> None:
        self.of_rank: dict[str, list[Tensor]] = {}

    def __call__(self, largest: Tensor, form: CastFormat) -> Tensor:
        factor = factor_of(largest, form)
        self.of_rank.setdefault(current_thread().name, []).append(factor)
        return factor


def test_ranks_cast_parts_of_a_tensor_with_equal_scales(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those between which a micro-batch's sequences are divided, and matrices; not if each took its own."""
    factors = Factors()
    monkeypatch.setattr(float8_operands, "factor_of", factors)
    plan = Plan(tp=2, cp=2, linears="float8", precision="bf16")
    thread_ranks.run(bits_of_gradients, plan, ranks=4)
    assert len(factors.of_rank) == 4
    casts = list(zip(*factors.of_rank.values(), strict=True))
    assert len(casts) == 22  # of inputs and output gradients; weights are cast before the step
    assert all(torch.equal(one[0], other) for one in casts for other in one[1:])
    monkeypatch.setattr(float8_operands, "reduced", lambda largest, groups: largest)
    factors.of_rank.clear()
    thread_ranks.run(bits_of_gradients, plan, ranks=4)
    casts = list(zip(*factors.of_rank.values(), strict=True))
    assert any(not torch.equal(one[0], other) for one in casts for other in one[1:])


def test_a_run_that_goes_on_with_other_scales_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of one micro-batch, loaded under others; nothing is said of the same ones."""
    saved = Plan(linears="float8", precision="bf16")
    plait.save(*run_of(saved), tmp_path / "saved")
    for plan, said in (
        (saved, ""),
        (replace(saved, strategy="full"), ""),
        (
            replace(saved, microbatches=2),
            "steps have had 1 micro-batches, and have 2 from now on, each with float8 scales of its own, so "
            "numbers change: plan.dp · plan.microbatches decides.\n",
        ),
        (
            replace(saved, linears=None),
            "linears have multiplied in float8, and multiply in the precision from now on, so numbers "
            "change: plan.linears decides.\n",
        ),
    ):
        capsys.readouterr()
        plait.load(*run_of(plan), tmp_path / "saved")
        assert capsys.readouterr().out == said


def test_a_run_whose_tokens_have_scales_of_their_own_goes_on_with_any_micro_batches() -> None:
    for recipe, says in (("float8", True), ("float8-rowwise", True), ("float8-rowwise-gw", False)):
        before = {"linears": recipe, "dp": 1, "microbatches": 1}
        assert bool(linears_change(before, Plan(linears=recipe, microbatches=2))) == says  # type: ignore[arg-type]


def test_a_reshard_to_other_micro_batches_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(linears="float8", precision="bf16")
    engine, optimizer = run_of(plan)
    engine, optimizer = plait.reshard(engine, optimizer, replace(plan, microbatches=3), plait.Mesh(plan))
    assert "steps have had 1 micro-batches, and have 3 from now on" in capsys.readouterr().out
    assert engine.plan.linears == "float8"


def run_of(plan: Plan) -> tuple[Any, torch.optim.Optimizer]:
    """An engine, and its optimizer."""
    engine = woven.weave(llama(), plan)
    return engine, torch.optim.AdamW(engine.parameters(), lr=0.1)


class Gated(nn.Module):
    """x + down(gelu(up(n)) * sigmoid(gate(n))), n = norm(x), whose gate gets no gradient, from no graph."""

    def __init__(self, *, records: bool) -> None:
        super().__init__()
        self.norm, self.records = nn.LayerNorm(32), records
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        with torch.set_grad_enabled(self.records and torch.is_grad_enabled()):
            gate = torch.sigmoid(self.gate(n)).detach()
        result: Tensor = x + self.down(torch.nn.functional.gelu(self.up(n)) * gate)
        return result


def gradients_of_gated(records: bool, plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(37, 32), Gated(records=records), nn.Linear(32, 37)).double()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    engine.forward_backward(tokens[:, :-1], tokens[:, 1:])
    return {name: one.clone() for name, one in engine.named_gradients()}


@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}, {"compile": "graphs"}], ids=str)
def test_a_linear_after_one_that_read_its_input_without_a_graph_has_its_gradient(
    thread_ranks: Any, fields: dict[str, Any]
) -> None:
    plan = Plan(linears="float8", precision="fp64", **fields)
    (expected,) = thread_ranks.run(gradients_of_gated, True, plan, ranks=1)
    (found,) = thread_ranks.run(gradients_of_gated, False, plan, ranks=1)
    assert expected["1.up.weight"].abs().max() > 0
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def frozen_losses(plan: Plan) -> list[float]:
    model = plait.models.llama(layers=2, hidden=32, heads=4, inner=32, vocab=48, context=16)
    for layer in (model.embedding, model.blocks[0]):
        layer.requires_grad_(False)
    engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
    tokens = torch.randint(48, (2, 17), generator=torch.Generator().manual_seed(1))
    return [engine.forward_backward(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(2)]


@pytest.mark.full
def test_compiled_layers_in_which_nothing_needs_a_gradient_multiply_in_float8(thread_ranks: Any) -> None:
    plan = Plan(linears="float8", precision="fp64")
    (expected,) = thread_ranks.run(frozen_losses, plan, ranks=1)
    (found,) = thread_ranks.run(frozen_losses, replace(plan, compile="graphs"), ranks=1)
    assert found == pytest.approx(expected, rel=1e-12)
