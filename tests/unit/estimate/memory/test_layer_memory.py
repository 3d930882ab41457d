"""The memory of a layer by its sizes, beside the trace of the layer on the meta device."""

from __future__ import annotations

from dataclasses import asdict, astuple
from itertools import product
from typing import Any

import pytest

import plait
from parity.pairs import in_quick
from plait.engine.blueprint import build_blueprint
from plait.estimate.memory.decoder_layer_memory import LayerMemory, layer_memory
from plait.estimate.memory.layer_traces import Trace
from plait.estimate.memory.predict_memory import MemoryEstimator
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.plan.decoder_sizes import Decoder, LayerKind, decoder_of
from plait.plan.plan import Plan

SIZES: dict[str, Any] = {"layers": 1, "hidden": 128, "heads": 8, "vocab": 200, "context": 64}
DIVISIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "bf16": {"precision": "bf16"},
    "tp": {"tp": 2},
    "keep": {"tp": 2, "sequence_parallel": "keep"},
    "ring": {"cp": 2, "context_parallel": "ring"},
    "ulysses": {"cp": 4, "context_parallel": "ulysses"},
}
MODES = ("none", "selective", "full")
QUICK = (
    *(("gpt2", "alone", "none"), ("llama", "tp", "full"), ("llama", "ring", "none")),
    *(("gpt2", "keep", "selective"), ("gpt2", "bf16", "full")),
)


@pytest.mark.parametrize(
    ("name", "division", "mode"), in_quick(product(("gpt2", "llama"), DIVISIONS, MODES), *QUICK)
)
def test_layers_keep_and_allocate_what_their_trace_does(name: str, division: str, mode: str) -> None:
    model = getattr(plait.models, name)(**SIZES)
    plan = Plan(microbatches=2, recompute=mode, **DIVISIONS[division])
    shape = MicrobatchShape(decoder_of(model), plan, rows=2, on_cpu=True)
    for kind, trace in zip(("attention", "mlp"), _traces(model, plan)[1:3], strict=True):
        found, expected = layer_memory(kind, mode, shape), _of(trace, shape.outside)
        few = 0.02 * shape.activation
        assert found.until_inputs == pytest.approx(expected.until_inputs, abs=few)
        assert found.until_weights == pytest.approx(expected.until_weights, abs=few)
        if (name, division) == ("llama", "bf16"):
            continue  # what a composed norm converts to fp32 for a moment is not counted
        assert found.backward == pytest.approx(expected.backward, abs=few)
        # Which local variables are alive differs a little.
        assert found.forward == pytest.approx(expected.forward, abs=1.1 * shape.activation)


@pytest.mark.parametrize(
    ("division", "mode"), in_quick(product(("alone", "bf16", "tp", "keep"), MODES), ("bf16", "none"))
)
def test_on_a_gpu_an_rms_norm_keeps_its_input_and_a_number_a_row(division: str, mode: str) -> None:
    model = plait.models.llama(**SIZES)
    plan = Plan(microbatches=2, recompute=mode, **DIVISIONS[division])
    shape = MicrobatchShape(decoder_of(model), plan, rows=2)
    found, trace = layer_memory("mlp", mode, shape), _traces(model, plan, device="cuda")[2]
    for name, value in asdict(_of(trace, shape.outside)).items():
        if name != "weights":
            assert getattr(found, name) == pytest.approx(value, abs=0.03 * shape.activation), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_heads_of_keys_are_repeated_in_fp32(mode: str, precision: str) -> None:
    """By as much as a layer with fewer heads takes less, or more, than one with all, in both."""
    plan, found, expected = Plan(microbatches=2, recompute=mode, precision=precision), [], []
    for heads in (8, 2, 1):
        model = plait.models.llama(**SIZES, kv_heads=heads)
        shape = MicrobatchShape(decoder_of(model), plan, rows=2)
        found.append(layer_memory("attention", mode, shape))
        expected.append(_of(_traces(model, plan, device="cuda")[1], shape.outside))
    for name in ("until_inputs", "until_weights", "backward"):
        sizes, traced = ([getattr(one, name) for one in each] for each in (found, expected))
        few = 0.15 * shape.activation
        assert [one - sizes[0] for one in sizes] == pytest.approx(
            [one - traced[0] for one in traced], abs=few
        )


def _traces(model: Any, plan: Plan, device: str = "cpu") -> Any:
    estimator = MemoryEstimator(model, rows=4, device=device)
    traces = estimator.known_traces(build_blueprint(model, plan, None, estimator.order_of))
    assert traces is not None
    return traces.layers


def _of(trace: Trace, gradient: float) -> LayerMemory:
    """Return what a trace says about a layer whose output's gradient has `gradient` bytes."""
    sizes = {**trace.forward.allocated, **trace.backward.allocated}
    given = dict.fromkeys(trace.output_gradients, gradient)
    return LayerMemory(
        sum(sizes.get(one, 0) for one in trace.forward.saved),
        sum(sizes.get(one, given.get(one, 0)) for one in trace.backward.saved),
        trace.forward.peak,
        trace.backward.peak,
        trace.weight_peak,
        gradient,
    )


LLAMA = Decoder(
    layers=2, hidden=32, heads=4, kv_heads=2, inner=48, vocab=60, context=16, gated=True, rotary=True
)
GPT = Decoder(layers=2, hidden=32, heads=4, vocab=60, context=16, biases=True, positions=True)


def shape_of(decoder: Decoder, *, on_cpu: bool = False, **fields: Any) -> MicrobatchShape:
    return MicrobatchShape(decoder, Plan(**fields), rows=2, on_cpu=on_cpu)


RECORDED: tuple[tuple[MicrobatchShape, dict[LayerKind, tuple[float, ...]]], ...] = (
    (
        shape_of(LLAMA, recompute="none"),
        {
            "embedding": (4096, 4096, 4096, 0, 0, 4096),
            "attention": (25216, 20480, 29312, 16384, 0, 4096),
            "mlp": (32896, 26624, 36992, 18432, 0, 4096),
            "head": (11904, 11776, 11904, 8192, 0, 0),
        },
    ),
    (
        shape_of(LLAMA, on_cpu=True, recompute="selective", precision="bf16"),
        {
            "embedding": (2048, 2048, 2048, 0, 0, 2048),
            "attention": (8704, 10240, 13824, 18560, 0, 2048),
            "mlp": (8192, 13312, 14336, 25728, 0, 2048),
            "head": (3840, 5888, 11520, 14464, 0, 0),
        },
    ),
    (
        shape_of(LLAMA, on_cpu=True, recompute="full", tp=2, sequence_parallel="keep", precision="bf16"),
        {
            "embedding": (1024, 2304, 3328, 4096, 0, 1024),
            "attention": (1024, 7168, 12288, 16448, 0, 1024),
            "mlp": (1024, 8704, 8704, 19520, 0, 1024),
            "head": (1920, 3968, 5760, 11328, 0, 0),
        },
    ),
    (
        shape_of(LLAMA, on_cpu=True, recompute="none", tp=2, sequence_parallel="regather"),
        {
            "embedding": (2304, 4352, 6400, 8192, 0, 2048),
            "attention": (14656, 10240, 31040, 7936, 16384, 2048),
            "mlp": (18496, 13312, 30784, 10240, 16384, 2048),
            "head": (8000, 5888, 12096, 10240, 8192, 0),
        },
    ),
    (
        shape_of(GPT, recompute="none", tp=2, precision="bf16"),
        {
            "embedding": (2560, 3584, 5632, 3072, 0, 2048),
            "attention": (8704, 8192, 10752, 4928, 0, 2048),
            "mlp": (12544, 12288, 14592, 8256, 0, 2048),
            "head": (4224, 3968, 8064, 4096, 0, 0),
        },
    ),
    (
        shape_of(GPT, recompute="full", tp=2, sequence_parallel="regather"),
        {
            "embedding": (2048, 6656, 8704, 14336, 0, 2048),
            "attention": (2048, 12288, 22528, 20736, 16384, 2048),
            "mlp": (2048, 20480, 22528, 35072, 16384, 2048),
            "head": (3840, 5888, 9984, 12416, 8192, 0),
        },
    ),
    (
        shape_of(GPT, recompute="selective", tp=2, sequence_parallel="keep"),
        {
            "embedding": (2048, 6656, 8704, 14336, 0, 2048),
            "attention": (10496, 16384, 22784, 18432, 0, 2048),
            "mlp": (10240, 24576, 26624, 33024, 0, 2048),
            "head": (3840, 7936, 7936, 14464, 0, 0),
        },
    ),
    (
        shape_of(GPT, recompute="full", precision="bf16"),
        {
            "embedding": (2048, 3328, 5376, 4096, 0, 2048),
            "attention": (2048, 12288, 12288, 19264, 0, 2048),
            "mlp": (2048, 20480, 16384, 35136, 0, 2048),
            "head": (3840, 5888, 11520, 6400, 0, 0),
        },
    ),
    (
        shape_of(LLAMA, recompute="none", cp=2, context_parallel="ring", precision="bf16"),
        {
            "embedding": (1024, 1024, 1024, 0, 0, 1024),
            "attention": (5440, 5120, 9792, 11776, 0, 1024),
            "mlp": (8256, 6656, 9280, 4608, 0, 1024),
            "head": (3008, 2944, 6848, 2048, 0, 0),
        },
    ),
    (
        shape_of(LLAMA, on_cpu=True, recompute="full", cp=4, context_parallel="ulysses"),
        {
            "embedding": (1024, 1024, 1024, 0, 0, 1024),
            "attention": (1024, 5120, 10368, 15520, 0, 1024),
            "mlp": (1024, 6656, 5632, 12832, 0, 1024),
            "head": (1920, 2944, 2944, 4128, 0, 0),
        },
    ),
    (
        shape_of(GPT, recompute="selective", cp=2, context_parallel="ulysses", precision="bf16"),
        {
            "embedding": (1024, 1664, 2688, 2048, 0, 1024),
            "attention": (5376, 6144, 11520, 13504, 0, 1024),
            "mlp": (5120, 10240, 9216, 13504, 0, 1024),
            "head": (1920, 2944, 5760, 3200, 0, 0),
        },
    ),
    (
        shape_of(GPT, recompute="full", cp=2, context_parallel="ring"),
        {
            "embedding": (2048, 3200, 5248, 4096, 0, 2048),
            "attention": (2048, 12288, 18944, 36352, 0, 2048),
            "mlp": (2048, 20480, 16384, 35072, 0, 2048),
            "head": (3840, 5888, 5888, 6272, 0, 0),
        },
    ),
    (
        shape_of(LLAMA, recompute="none", loss_rows=8, precision="bf16"),
        {
            "embedding": (2048, 2048, 2048, 0, 0, 2048),
            "attention": (10880, 10240, 12928, 6144, 0, 2048),
            "mlp": (16512, 13312, 18560, 9216, 0, 2048),
            "head": (2176, 0, 2176, 4928, 0, 0),
        },
    ),
    (
        shape_of(GPT, recompute="full", loss_rows=100, tp=2, sequence_parallel="keep"),
        {
            "embedding": (2048, 6656, 8704, 14336, 0, 2048),
            "attention": (2048, 16384, 20480, 26880, 0, 2048),
            "mlp": (2048, 24576, 18432, 41216, 0, 2048),
            "head": (4096, 0, 4096, 14464, 0, 0),
        },
    ),
)
"""Bytes of tiny layers of each kind, in the order of the fields of `LayerMemory`."""


def test_layers_have_the_bytes_that_were_recorded() -> None:
    """Each term counts in one of the rows; that they are right is what the traces above say."""
    for shape, expected in RECORDED:
        mode = shape.plan.recompute
        assert not isinstance(mode, tuple)
        for kind, numbers in expected.items():
            assert astuple(layer_memory(kind, mode, shape)) == numbers, (shape.plan, kind)
