"""The memory of a layer by its sizes, beside the trace of the layer on the meta device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import plait
from parity.pairs import in_quick
from plait.blueprint import build_blueprint
from plait.footprint.estimate import MemoryEstimator
from plait.footprint.traces import Trace
from plait.plan import Plan
from plait.prediction.framework import PLAIT
from plait.prediction.hardware import load_hardware
from plait.prediction.layer_memory import LayerMemory, layer_memory
from plait.prediction.layer_operations import StepShape
from plait.prediction.model_sizes import decoder_of

SIZES: dict[str, Any] = {"layers": 1, "hidden": 128, "heads": 8, "vocab": 200, "context": 64}
ON_CPU = PLAIT.on(load_hardware("cpu-two-cores"))
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
    *(("gpt2", "keep", "selective"), ("gpt2", "bf16", "full"), ("llama", "ulysses", "selective")),
)


@pytest.mark.parametrize(
    ("name", "division", "mode"), in_quick(product(("gpt2", "llama"), DIVISIONS, MODES), *QUICK)
)
def test_layers_keep_and_allocate_what_their_trace_does(name: str, division: str, mode: str) -> None:
    model = getattr(plait.models, name)(**SIZES)
    plan = Plan(microbatches=2, recompute=mode, **DIVISIONS[division])
    shape = StepShape(decoder_of(model), plan, ON_CPU, rows=2)
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


def _traces(model: Any, plan: Plan) -> Any:
    estimator = MemoryEstimator(model, rows=4)
    traces = estimator._traces(build_blueprint(model, plan, None, estimator.order_of))
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
