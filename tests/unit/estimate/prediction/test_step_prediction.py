from dataclasses import replace
from typing import Any

import pytest

import plait
from plait.errors import PlanError
from plait.estimate.prediction.predicted_model import DecoderModel
from plait.estimate.prediction.prediction import predict
from plait.estimate.time.hardware import load_hardware
from plait.pictures.quantities import memory_text
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan

SMALL = Decoder(layers=8, hidden=1024, heads=16, vocab=32000, context=1024, gated=True, rotary=True)
LLAMA_405B = Decoder(
    layers=126,
    hidden=16384,
    heads=128,
    kv_heads=8,
    inner=53248,
    vocab=128256,
    context=8192,
    gated=True,
    rotary=True,
)
MIXED = {"precision": "bf16", "master_precision": "fp32"}
PLANS = [
    Plan(microbatches=2, **MIXED),
    Plan(pp=4, microbatches=8, **MIXED),
    Plan(pp=2, tp=2, dp=2, microbatches=4, schedule="zb-h1", strategy="optimizer", **MIXED),
    Plan(pp=2, microbatches=4, schedule="interleaved", recompute="full", **MIXED),
    Plan(tp=8, dp=8, microbatches=2, strategy="full", reduce="each", sequence_parallel="keep", **MIXED),
    Plan(cp=16, tp=2, recompute="selective", **MIXED),
]


@pytest.mark.parametrize("speedup", [1.0, 1.5])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule}-{plan.world}")
def test_the_breakdown_adds_up_to_the_step_and_has_no_negative_part(plan: Plan, speedup: float) -> None:
    found = predict(SMALL, plan, replace(load_hardware("h100-sxm"), waiting_speedup=speedup))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_seconds, rel=1e-12)
    assert min(found.breakdown.values()) >= -1e-6 * found.step_seconds
    assert found.step_seconds >= found.timeline.makespan * 1e-9 * (1 - 1e-9)
    assert found.tokens_per_second == pytest.approx(plan.microbatches * plan.dp * 1024 / found.step_seconds)
    assert 0 < found.mfu < 1
    assert (found.hfu > found.mfu) == (plan.recompute == "full")


def test_the_bubble_of_even_stages_is_the_one_of_the_papers() -> None:
    """Of 1F1B with p ranks and m micro-batches: (p − 1) / (m + p − 1), arXiv:2104.04473, section 2.2.1."""
    assert _bubble(EVEN_STAGES) == pytest.approx(3 / 15, rel=0.05)


def test_the_bubble_is_shorter_where_input_gradients_are_sent_first() -> None:
    """It is (p − 1) · (T_F + T_B), without T_W, in the notation of arXiv:2401.10241."""
    plan = replace(EVEN_STAGES, overlap=None)
    first, stage, _, last = predict(EVEN_64, plan, "h100-sxm").times.passes
    waiting = 3 * (stage.forward.total + stage.inputs.total)
    waiting += 12 * (last.total.total - first.total.total)  # the last stage is a little longer
    assert _bubble(plan) == pytest.approx(waiting / (waiting + 12 * first.total.total), rel=0.01)


EVEN_64 = replace(SMALL, layers=64, vocab=1)
EVEN_STAGES = Plan(pp=4, microbatches=12, layers_per_stage=(33, *(32,) * 2, 33), overlap=True, **MIXED)


def _bubble(plan: Plan) -> float:
    found = predict(EVEN_64, plan, "h100-sxm")
    pipeline = found.timeline.makespan * 1e-9
    return (found.breakdown["bubble"] + found.breakdown["pp communication"]) / pipeline


@pytest.mark.parametrize(
    ("plan", "hidden"),
    [
        (Plan(tp=2), [True]),
        (Plan(tp=2, overlap=False), [False]),
        (Plan(pp=2, tp=2, microbatches=2), [True, False]),  # the first stage sends no gradient
        (Plan(pp=2, tp=2, microbatches=2, overlap=True), [True, True]),
        (Plan(pp=2, tp=2, microbatches=2, schedule="zb-h1"), [False, False]),
        (Plan(pp=2, tp=2, microbatches=2, schedule="zb-h1", overlap=True), [False, False]),
    ],
    ids=str,
)
def test_sums_are_hidden_where_weight_gradients_follow_each_layer(plan: Plan, hidden: list[bool]) -> None:
    found = predict(SMALL, replace(plan, **MIXED), "h100-sxm")
    sums = [stage.inputs.tp / stage.forward.tp for stage in found.times.passes]
    assert [share < 0.5 for share in sums] == hidden
    assert "W" in str(found.timeline.schedule) or plan.pp == 1 or plan.overlap is True


def test_recomputation_costs_a_third_more_and_saves_activations() -> None:
    plan = Plan(pp=2, microbatches=8, **MIXED)
    kept, again = (predict(SMALL, replace(plan, recompute=mode), "h100-sxm") for mode in ("none", "full"))
    assert 1.2 < again.step_seconds / kept.step_seconds < 1.4
    assert again.breakdown["recomputation"] > 0 == kept.breakdown["recomputation"]
    for found in (kept, again):
        last = max(range(2), key=lambda rank: found.times.ends[rank])
        assert found.breakdown["recomputation"] == 8 * found.times.passes[last].inputs.recomputation
    assert again.memory[0].activations < kept.memory[0].activations / 4


def test_the_loss_in_chunks_computes_as_much_in_less_memory() -> None:
    """Each chunk reads and writes the gradient of the head's weight."""
    plan = Plan(microbatches=4, schedule="zb-h1", **MIXED)
    whole, chunks = (predict(SMALL, replace(plan, loss_rows=rows), "h100-sxm") for rows in (None, 256))
    assert 1 < chunks.breakdown["matrix products"] / whole.breakdown["matrix products"] < 1.2
    assert chunks.memory[0].activations < whole.memory[0].activations - whole.memory[0].temporary / 3


def test_overlap_of_sums_reduces_the_predicted_communication_time() -> None:
    plan = Plan(dp=64, tp=8, microbatches=2, **MIXED)
    gpu = load_hardware("h100-sxm")
    hidden, plain = (predict(SMALL, plan, replace(gpu, overlaps=one)) for one in (True, False))
    for kind in ("tp communication", "dp communication"):
        assert hidden.breakdown[kind] < plain.breakdown[kind]


def test_gathers_are_not_hidden_while_sums_over_tp_use_their_links() -> None:
    plan = Plan(tp=16, dp=64, strategy="full", reduce="each", microbatches=2, **MIXED)

    def exposed(devices: int) -> float:
        hardware = replace(load_hardware("h100-sxm"), oversubscription=2.0, devices=devices)
        return predict(LLAMA_405B, plan, hardware, rows=8).breakdown["dp communication"]

    assert exposed(8) > 5 * exposed(16)


LONG = replace(SMALL, context=1 << 16)


def test_a_ring_hides_behind_attention_and_the_exchanges_of_ulysses_do_not() -> None:
    def communication(**fields: Any) -> float:
        return predict(LONG, Plan(cp=4, **fields, **MIXED), "h100-sxm").breakdown["cp communication"]

    assert communication(context_parallel="ring") == 0.0
    again, kept = (
        communication(context_parallel="ulysses", sequence_parallel=one) for one in ("none", "keep")
    )
    # Queries, keys, values and outputs go there and back; outputs that are not kept once more, in one call.
    assert again == pytest.approx(kept * 9 / 8, rel=0.02)
    few_keys = replace(LONG, kv_heads=1)
    assert communication() == again, "auto sends less by heads"
    assert predict(few_keys, Plan(cp=2, **MIXED), "h100-sxm").breakdown["cp communication"] == 0.0


def test_nothing_is_hidden_on_hardware_that_moves_the_bytes_itself() -> None:
    gpu = load_hardware("h100-sxm")
    for axis, plan in {
        "dp": Plan(dp=2, **MIXED),
        "tp": Plan(tp=2, **MIXED),
        "cp": Plan(cp=2, context_parallel="ring", **MIXED),
    }.items():
        hidden, shown = (
            predict(LONG, plan, replace(gpu, overlaps=one), rows=2).breakdown[f"{axis} communication"]
            for one in (True, False)
        )
        assert shown > 1.2 * hidden, axis


def test_small_layers_are_limited_by_the_host() -> None:
    tiny = replace(SMALL, hidden=64, heads=4, context=32, vocab=100)
    assert predict(tiny, Plan(precision="bf16"), "h100-sxm").bound == "host overhead"


def test_the_host_does_not_count_where_cuda_graphs_are_replayed() -> None:
    tiny, plan = replace(SMALL, hidden=64, heads=4, context=32, vocab=100), Plan(precision="bf16")
    eager, graphs = (predict(tiny, replace(plan, cuda_graphs=one), "h100-sxm") for one in (False, True))
    assert eager.breakdown["host overhead"] > 0
    assert graphs.breakdown.get("host overhead", 0) == 0
    shorter = eager.step_seconds - graphs.step_seconds
    assert shorter == pytest.approx(eager.breakdown["host overhead"])
    tensor = predict(tiny, replace(plan, tp=2, cuda_graphs=True), "h100-sxm")
    assert tensor.bound == "host overhead"


def test_figures_of_a_step_follow_from_its_time_and_memory() -> None:
    plan = Plan(pp=2, dp=2, cp=2, microbatches=4, recompute="full", loss_rows=64, precision="bf16")
    model = replace(SMALL, layers=2)
    found = predict(model, plan, "h100-sxm", rows=8)
    assert (found.rows, found.tokens, found.plan.world) == (8, 8 * 2 * 1024, 8)
    assert found.tokens_per_second == found.tokens / found.times.seconds
    needed = model.operations_per_token * found.tokens / 8 / found.step_seconds
    assert found.mfu == pytest.approx(needed / 989.4e12)
    assert found.hfu == pytest.approx(found.mfu * 4 / 3)
    assert found.times.timer.precision == "bf16"
    assert found.peak_memory == max(rank.allocated for rank in found.memory)
    assert {rank.reserved for rank in found.memory} == {2.5 * 2**30}
    needed = found.peak_memory + 2.5 * 2**30
    for room, fits in ((0.0, True), (-1.0, False), (-(2.0**30), False)):
        other = predict(model, plan, replace(found.hardware, memory=needed + room), rows=8)
        assert other.fits is fits
        text = "which fits the" if fits else f"{memory_text(-room)} more than the"
        assert f"allocated at most, {text} {memory_text(needed + room)} of h100-sxm" in str(other)
    assert predict(model, Plan(), "h100-sxm").times.timer.precision == "fp32"


def test_the_text_has_the_parts_of_the_step_that_take_time() -> None:
    lines = str(predict(SMALL, Plan(tp=2, microbatches=2, **MIXED), "h100-sxm")).splitlines()
    assert [line[:26].strip() for line in lines[2:]] == [
        *("matrix products", "attention", "element-wise", "tp communication", "optimizer", "host overhead"),
    ]
    assert sum(float(line.split()[-1].rstrip("%")) for line in lines[2:]) == pytest.approx(100, abs=0.3)


def test_the_cut_is_that_of_the_costs_of_layers() -> None:
    """With logits of some rows the head's products are all in its input gradient."""
    wide = replace(SMALL, layers=2, vocab=128_000)
    for rows in (None, 64):
        plan = Plan(pp=2, microbatches=2, loss_rows=rows)
        costs = DecoderModel(wide).costs_for_cut(plan)
        head = 1 + 1024 * 128_000
        third = (head / 3,) * 3 if rows is None else (1 / 3, head - 2 / 3, 1 / 3)
        assert (costs.F[-1], costs.I[-1], costs.W[-1]) == pytest.approx(third)
        assert costs.total == pytest.approx(wide.layer_costs)
        assert costs.comm == pytest.approx(0.01 * sum(wide.layer_costs) / 2)


def test_a_model_is_predicted_by_its_sizes() -> None:
    model = plait.models.llama(layers=2, hidden=64, heads=4, vocab=100, context=32)
    given = replace(SMALL, layers=2, hidden=64, heads=4, vocab=100, context=32, kv_heads=4)
    plan = Plan(pp=2, microbatches=4, **MIXED)
    assert plait.predict(model, plan, "h100-sxm").breakdown == predict(given, plan, "h100-sxm").breakdown


def test_llama_405b_on_16384_ranks_is_predicted_at_a_plausible_mfu() -> None:
    plan = Plan(
        pp=16,
        tp=8,
        dp=128,
        microbatches=16,
        recompute="full",
        strategy="optimizer",
        sequence_parallel="regather",
        **MIXED,
    )
    found = predict(LLAMA_405B, plan, "h100-sxm", rows=16)
    assert LLAMA_405B.total_parameters == pytest.approx(405.85e9, rel=1e-3)
    assert 0.15 < found.mfu < 0.45
    assert "on 16,384 ranks" in str(found)


@pytest.mark.parametrize(
    ("plan", "rows", "error", "message"),
    [
        (Plan(microbatches=4), 3, PlanError, "rows is 3, and plan.microbatches is 4"),
        (Plan(tp=32), 1, PlanError, "plan.tp = 32 is more than model.heads = 16"),
        (Plan(recompute=("full",)), 1, PlanError, "plan.recompute has 1 values, but the model has 18 layers"),
        (Plan(pp=32, microbatches=32), 32, PlanError, "32 stages need at least 32 layers"),
    ],
)
def test_predict_refuses_plans_that_cannot_run_in_one_sentence(
    plan: Plan, rows: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        predict(SMALL, plan, "h100-sxm", rows=rows)
