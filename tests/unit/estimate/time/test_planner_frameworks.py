"""What `benchmarks/planner` does otherwise than plait, for the frameworks of published runs."""

from __future__ import annotations

from dataclasses import astuple, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from one_second_kernels import DECODER, HARDWARE

from benchmark_modules import find_modules_of
from plait.estimate.memory.decoder_layer_memory import LayerMemory
from plait.estimate.prediction.prediction import predict
from plait.estimate.time.decoder_operations import MicrobatchShape, layer_work
from plait.estimate.time.hardware import load_hardware
from plait.estimate.time.layer_times import LayerTimer, Parts, PassTimes
from plait.estimate.time.layer_work import Recomputation
from plait.estimate.time.operation_times import Elementwise, Product
from plait.plan.decoder_sizes import Decoder
from plait.plan.plan import Plan
from plait.schedules.held_microbatches import HeldMicrobatches
from plait.schedules.search.schedule_by_policy import schedule

FOLDER = Path(__file__).parents[4] / "benchmarks" / "planner"
LLAMA = Decoder(
    layers=2, hidden=32, heads=4, kv_heads=2, inner=48, vocab=60, context=16, gated=True, rotary=True
)
GPT = Decoder(layers=2, hidden=32, heads=4, vocab=60, context=16, biases=True, positions=True)
BF16 = {"precision": "bf16", "overlap": True}


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of the benchmark's modules."""
    find_modules_of(FOLDER, monkeypatch)
    found = SimpleNamespace()
    for name in ("frameworks", "framework_times", "framework_memory", "runs"):
        vars(found).update(vars(import_module(name)))
    return found


def timer(planner: Any, framework: Any, plan: Plan, decoder: Decoder = DECODER, rows: float = 1) -> Any:
    return planner.FrameworkTimer(MicrobatchShape(decoder, plan, rows), HARDWARE, "bf16", framework=framework)


def test_a_framework_without_switches_takes_the_times_of_plait(planner: Any) -> None:
    plan = Plan(tp=2, dp=4, strategy="full", reduce="each", sequence_parallel="regather", **BF16)
    plain = LayerTimer(MicrobatchShape(DECODER, plan, 1), HARDWARE, "bf16")
    for kind in ("embedding", "attention", "mlp", "head"):
        assert timer(planner, planner.Framework(), plan).times(kind, "none") == plain.times(kind, "none")


def test_attention_that_is_not_fused_reads_and_writes_all_scores(planner: Any) -> None:
    plan = Plan(cp=2, tp=2, **BF16)
    work = timer(planner, planner.MEGATRON_2021, plan, DECODER, 3).work("attention")
    scores, values = Product(32, 64, 16, batch=9), Product(32, 16, 64, batch=9)
    matrix, turned = 9 * 32 * 64 * 2, Product(64, 16, 32, batch=9)
    assert work.forward[3:6] == (scores, Elementwise(4.5 * matrix, 2), values)
    assert work.backward[2:7] == (scores, turned, Elementwise(5.5 * matrix, 2), values, values)
    found = timer(planner, planner.MEGATRON_2021, Plan(**BF16)).times("attention", "none")
    assert found == PassTimes(Parts(2, 2, 6), Parts(2, 4, 7), Parts(2))  # whose products count as attention


def test_layers_are_repeated_to_their_end_or_the_scores_of_attention_only(planner: Any) -> None:
    plan = Plan(tp=2, sequence_parallel="keep", **BF16)
    for kind in ("attention", "mlp"):
        work = timer(planner, planner.FSDP, plan).work(kind)
        assert work.full == Recomputation(work.forward, work.forward_transfers)
        assert work.selective == layer_work(kind, MicrobatchShape(DECODER, plan, 1)).selective
    again = timer(planner, planner.MEGATRON_2022, plan)
    attention = again.work("attention")
    assert attention.selective == Recomputation(attention.forward[3:6])
    assert again.work("mlp").selective == Recomputation()
    assert again.work("head").full == again.work("head").selective == Recomputation()


def test_element_wise_operations_move_more_bytes_and_a_fused_loss_fewer(planner: Any) -> None:
    plan = Plan(**BF16)
    twice = timer(planner, planner.Framework(elementwise_passes=2.0), plan)
    fused = timer(planner, planner.Framework(fused_loss=True), plan)
    for kind in ("embedding", "attention", "mlp", "head"):
        plain = layer_work(kind, MicrobatchShape(DECODER, plan, 1))
        for one, other in zip(plain.forward + plain.backward, operations_of(twice.work(kind)), strict=True):
            assert other == (replace(one, nbytes=2 * one.nbytes) if isinstance(one, Elementwise) else one)
    plain, work = layer_work("head", MicrobatchShape(DECODER, plan, 1)), fused.work("head")
    for one, other in ((plain.forward[-1], work.forward[-1]), (plain.backward[0], work.backward[0])):
        assert isinstance(one, Elementwise)
        assert other == Elementwise(one.nbytes / 2, one.kernels / 2)
    assert (work.forward[:-1], work.backward[1:]) == (plain.forward[:-1], plain.backward[1:])
    metrics = timer(planner, planner.Framework(fused_loss=True, loss_metrics=2), plan).work("head")
    assert metrics.forward == work.forward
    assert metrics.backward == (*work.backward, plain.forward[-1], plain.forward[-1])


def operations_of(work: Any) -> tuple[Any, ...]:
    return (*work.forward, *work.backward)


def test_sums_are_not_hidden_or_in_shards_by_products(planner: Any) -> None:
    plan = Plan(tp=2, sequence_parallel="keep", **BF16)
    for framework, forward, backward in [
        (planner.Framework(), 12, 6 + 6 - 2),
        (planner.FSDP, 12, 12),
        (planner.Framework(overlaps_tensor_products=True), 0.3 * 12, 0.3 * 12),
    ]:
        found = timer(planner, framework, plan).times("attention", "none")
        assert (found.forward.tp, found.inputs.tp) == pytest.approx((forward, backward))
    again = timer(planner, planner.Framework(overlaps_tensor_products=True), plan).times("attention", "full")
    assert again.inputs.recomputation == pytest.approx(7 + 0.3 * 12 + 100)
    assert timer(planner, planner.FSDP, plan).hides_gradient_sums
    assert not timer(planner, planner.MEGATRON_CORE, plan).hides_gradient_sums


def test_parameters_are_gathered_once_a_step(planner: Any) -> None:
    """Over 32 ranks it takes 5 + 31 seconds, of which the forward of 7 hides its part."""
    plan = Plan(dp=32, strategy="full", microbatches=2, **BF16)
    found = timer(planner, planner.Framework(frees_gathered=False), plan).times("attention", "none")
    assert (found.forward.dp, found.inputs.dp) == (18 - 7, 0)


def test_a_message_has_the_ranks_shard_and_a_rank_waits_while_it_sends(planner: Any) -> None:
    slow = replace(HARDWARE, inside=replace(HARDWARE.inside, bandwidth=10.0))
    for fields, parts in [({}, 1), ({"tp": 2}, 2), ({"tp": 2, "sequence_parallel": "keep"}, 2)]:
        shape = MicrobatchShape(DECODER, Plan(pp=2, **fields, **BF16), 1)
        made = planner.FrameworkTimer(shape, slow, "bf16", framework=planner.MEGATRON_2021)
        expected = 6 + 64 * 96 * 2 / parts / (10 * slow.efficiency.inside)
        assert made.message_seconds == pytest.approx(expected)
    # Forward and backward take 8 and 14 seconds on the first stage, 12 and 16 on the last, a message 6.
    plan = Plan(pp=2, microbatches=2, schedule="gpipe", **BF16)
    blocks = planner.Framework(blocking_messages=True)
    found = planner.quick_step(DECODER, plan, (2, 2), 2, blocks, HARDWARE)
    assert found.ends == pytest.approx((14 + 2 * 18 + 2 * 22 + 20, 14 + 36 + 44), rel=1e-9)


def test_steps_of_many_microbatches_are_extrapolated_from_shorter_ones(planner: Any) -> None:
    for policy, count, simulated in [
        ("1f1b", 28, (28, None)),
        ("1f1b", 29, (25, 21)),
        ("1f1b", 63, (27, 23)),
        ("zb-h1", 63, (27, 23)),
        ("interleaved", 64, (24, 20)),
        ("interleaved", 63, (63, None)),  # whose groups are of unequal sizes
    ]:
        chunks = 2 if policy == "interleaved" else None
        plan = Plan(pp=4, microbatches=count, schedule=policy, chunks=chunks, recompute="none", **BF16)
        model, gpu = replace(DECODER, layers=8, hidden=960, heads=15), load_hardware("h100-sxm")
        whole = predict(model, plan, gpu, rows=2 * count)
        cut, framework = whole.layers_per_stage, planner.Framework()
        part = planner.quick_step(model, plan, cut, 2 * count, framework, gpu)
        assert (part.schedule.microbatches, part.shorter and part.shorter.microbatches) == simulated
        assert part.passes == whole.times.passes
        assert part.seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    in_fp8 = planner.quick_step(DECODER, Plan(), (4,), 1, planner.Framework(product_precision="fp8"), gpu)
    assert in_fp8.timer.precision == "fp8"


def test_the_fastest_setup_that_fits_is_predicted(planner: Any) -> None:
    slow, fast = Plan(recompute="full", **BF16), Plan(**BF16)
    setups = [planner.Setup(LLAMA, plan, 1, "one", planner.Framework()) for plan in (slow, fast)]
    case, roomy = planner.Case("", 1.0, tuple(setups)), {"one": load_hardware("h100-sxm")}
    needed = [one.allocated(roomy) + roomy["one"].reserved for one in setups]
    assert needed[0] < needed[1]
    for memory, chosen, fits in [(needed[1], 1, True), (needed[0], 0, True), (needed[0] - 1, 1, False)]:
        machines = {"one": replace(roomy["one"], memory=memory)}
        assert case.setup(machines) is setups[chosen]
        assert case.fits(machines) is fits
        assert case.step_seconds(machines) == setups[chosen].step_seconds(machines)


RECORDED: tuple[tuple[str, Decoder, dict[str, Any], dict[str, tuple[float, ...]]], ...] = (
    (
        "MEGATRON_2021",
        GPT,
        {"recompute": "none", "tp": 2},
        {
            "embedding": (2560, 3584, 5632, 3072, 0, 2048),
            "attention": (13568, 8192, 15616, 4160, 0, 2048),
            "mlp": (12544, 12288, 14592, 8256, 0, 2048),
            "head": (8064, 3968, 8064, 2176, 0, 0),
        },
    ),
    (
        "MEGATRON_2022",
        GPT,
        {"recompute": "selective", "tp": 2, "sequence_parallel": "regather"},
        {
            "embedding": (1024, 3584, 4608, 7168, 0, 1024),
            "attention": (6272, 6144, 17408, 10304, 8192, 1024),
            "mlp": (10368, 10240, 15360, 8256, 8192, 1024),
            "head": (6912, 2944, 6912, 3200, 4096, 0),
        },
    ),
    (
        "FSDP",
        LLAMA,
        {"recompute": "full"},
        {
            "embedding": (2048, 2048, 2048, 0, 0, 2048),
            "attention": (0, 10240, 10240, 14976, 0, 2048),
            "mlp": (2048, 13312, 11264, 34560, 0, 2048),
            "head": (13696, 5888, 21376, 15360, 0, 0),
        },
    ),
    (
        "MEGATRON_CORE",
        LLAMA,
        {"recompute": "selective", "cp": 2, "context_parallel": "ring"},
        {
            "embedding": (1024, 1024, 1024, 0, 0, 1024),
            "attention": (4352, 5120, 9728, 12864, 0, 1024),
            "mlp": (4096, 6656, 6656, 5696, 0, 1024),
            "head": (3008, 2944, 3008, 3968, 0, 0),
        },
    ),
)
"""Bytes of tiny layers of each kind, in the order of the fields of `LayerMemory`."""


def test_layers_have_the_bytes_that_were_recorded(planner: Any) -> None:
    """Of each kind of layer in other frameworks: the recorded numbers."""
    for name, decoder, fields, expected in RECORDED:
        shape, framework = MicrobatchShape(decoder, Plan(**fields, **BF16), 2), getattr(planner, name)
        for kind, numbers in expected.items():
            found = planner.framework_layer(kind, fields["recompute"], shape, framework)
            assert astuple(found) == numbers, (name, kind)


def test_placeholder_gradients_are_one_of_each_size_or_all(planner: Any) -> None:
    decoder = Decoder(layers=2, hidden=96, heads=6, kv_heads=2, inner=160, vocab=510, context=64, tied=True)
    attention, mlp, table = 96 * (96 + 32) + 96, 96 * 160 + 96, 96 * 510 / 2
    for kept, expected in [
        ("none", 0),
        ("sizes", 2 * (attention + mlp + table + 96)),
        ("all", 2 * (2 * attention + mlp + table + 96)),
    ]:
        framework, shape = (
            planner.Framework(placeholder_gradients=kept),
            MicrobatchShape(decoder, Plan(tp=2, **BF16), 1),
        )
        stages = [("embedding", "attention"), ("mlp", "attention", "head")]
        assert planner.placeholder_gradients(shape, framework, stages) == expected


def test_a_rank_that_sends_a_shard_of_its_output_keeps_no_more_of_it(planner: Any) -> None:
    memory = LayerMemory(5000, 1, 2, 3, 4, 5)
    whole = 2 * 16 * 32 * 4
    for fields, kept in (
        ({}, 5000),
        ({"tp": 2}, 5000 - whole / 2),
        ({"tp": 4}, 5000 - whole * 3 / 4),
        ({"tp": 2, "sequence_parallel": "keep"}, 5000),  # a shard already
    ):
        shape = MicrobatchShape(GPT, Plan(**fields), 2)
        assert planner.sending_parts(memory, shape) == replace(memory, until_inputs=kept)
    small = replace(memory, until_inputs=9)
    assert planner.sending_parts(small, MicrobatchShape(GPT, Plan(tp=2), 2)).until_inputs == 0


def test_a_rank_has_its_frameworks_messages_shards_and_placeholders(planner: Any) -> None:
    made = schedule("1f1b", ranks=2, microbatches=4)
    shape = MicrobatchShape(GPT, Plan(pp=2, tp=2, microbatches=4, **BF16), 2)
    stages, modes = (GPT.kinds[:3], GPT.kinds[3:]), (("none",) * 3,) * 2
    first = HeldMicrobatches(made).ranks[0]
    shard = shape.activation / 2

    def found(**switches: Any) -> Any:
        framework = planner.Framework(**switches)
        known = planner.FrameworkMemories(shape, made, stages, modes, framework=framework)
        return known, known.activations(first).with_state(shape, 0.0)

    (plain, usual), (blocking, _) = found(), found(blocking_messages=True)
    assert plain.messages(first) == (first.receive_buffers * shape.outside, first.sending * shape.outside)
    assert blocking.messages(first) == (first.received * shape.outside, 0.0)
    assert usual.allocated - found(messages_divided=True)[1].allocated == 2 * shard  # of two micro-batches
    placeholders = planner.placeholder_gradients(
        shape, planner.Framework(placeholder_gradients="all"), stages[:1]
    )
    assert found(placeholder_gradients="all")[1].allocated - usual.allocated == placeholders > 0
