"""The work of layers recorded on the meta device, beside the formulas of gpt2 and llama."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.pairs import in_quick
from plait.engine.blueprint import build_blueprint
from plait.estimate.memory.layer_traces import Trace
from plait.estimate.memory.model_traces import ModelTraces, trace_model
from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.time.decoder_operations import LayerWork, MicrobatchShape, Recomputation, layer_work
from plait.estimate.time.hardware import load_hardware
from plait.estimate.time.layer_times import LayerTimer
from plait.estimate.time.operation_times import (
    AxisTransfer,
    DeviceOperation,
    Elementwise,
    FusedAttention,
    Product,
    attention_flops,
    product_flops,
)
from plait.plan.decoder_sizes import LayerKind, decoder_of
from plait.plan.plan import Plan

SMALL = {"layers": 1, "hidden": 96, "heads": 8, "vocab": 512, "context": 64}
LARGE = {"layers": 1, "hidden": 4096, "heads": 32, "vocab": 32000, "context": 2048}
GROUPED = {"kv_heads": 4, "inner": 160}
ROWS = 3
BLOCK: tuple[LayerKind, ...] = ("embedding", "attention", "mlp", "head")


class Layers:
    """The works of the layers of a model of plait's own by formulas, `by_hand`, and recorded, `found`."""

    def __init__(self, family: str, sizes: dict[str, Any], *, on_cpu: bool = True, **plan: Any) -> None:
        model = getattr(plait.models, family)(**sizes)
        self.shape = MicrobatchShape(decoder_of(model), Plan(**plan), ROWS, on_cpu)
        self.by_hand = {kind: layer_work(kind, self.shape) for kind in BLOCK}
        tokens = torch.empty(ROWS, sizes["context"], dtype=torch.int64, device="meta")
        traces = traced(model, tokens, OperationRecorder(fuses=not on_cpu), **plan)
        self.found = dict(zip(BLOCK, traces.works, strict=True))

    def seconds(self, hardware: str, kind: LayerKind) -> tuple[float, float]:
        """Return the time of a layer by its formula, and of what was recorded."""
        recompute = self.shape.plan.recompute
        assert isinstance(recompute, str)
        timers = (
            kind_of_timer(works)(self.shape, load_hardware(hardware), self.shape.precision)
            for works in (self.by_hand, self.found)
        )
        formula, recorded = (timer.times(kind, recompute).total.total for timer in timers)
        return formula, recorded


def kind_of_timer(works: dict[LayerKind, LayerWork]) -> type[LayerTimer]:
    class TimesWorks(LayerTimer):
        def work(self, kind: LayerKind) -> LayerWork:
            return works[kind]

    return TimesWorks


def traced(model: nn.Module, given: Tensor, recorder: OperationRecorder | None, **plan: Any) -> ModelTraces:
    return trace_model(build_blueprint(model, Plan(**plan)), given, None, plait.cross_entropy, recorder)


def flops(operations: Iterable[DeviceOperation]) -> tuple[float, float]:
    """Return the operations of products, and of attention."""
    found = list(operations)
    return (
        sum(product_flops(one) for one in found if isinstance(one, Product)),
        sum(attention_flops(one) for one in found if isinstance(one, FusedAttention)),
    )


def nbytes(operations: Iterable[DeviceOperation]) -> float:
    return sum(one.nbytes for one in operations if isinstance(one, Elementwise))


def totals(transfers: Iterable[AxisTransfer]) -> dict[tuple[str, str], float]:
    """Return the bytes of all transfers of a kind over an axis."""
    found: dict[tuple[str, str], float] = {}
    for one in transfers:
        key = one.collective, one.axis
        found[key] = found.get(key, 0.0) + one.nbytes
    return found


def again(work: LayerWork) -> Recomputation:
    """Return what the backward runs again, in the one mode of which there is something."""
    return work.full if work.full != Recomputation() else work.selective


BF16 = {"precision": "bf16", "master_precision": "fp32"}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("llama", BF16),
    ("gpt2", {"tp": 2, "recompute": "selective"}),
    ("llama", {"tp": 4, "recompute": "full"}),
    ("gpt2", {"tp": 4, "sequence_parallel": "keep", "recompute": "full", **BF16}),
    ("llama", {"tp": 2, "sequence_parallel": "keep", "recompute": "selective"}),
    ("gpt2", {"tp": 2, "sequence_parallel": "regather"}),
    ("llama", {"tp": 4, "sequence_parallel": "regather", "recompute": "selective", **BF16}),
    ("llama", {"cp": 2, "context_parallel": "ring", "recompute": "full", **BF16}),
    ("llama", {"cp": 2, "context_parallel": "ulysses", "sequence_parallel": "keep"}),
    ("gpt2", {"cp": 2, "context_parallel": "ulysses", "recompute": "selective"}),
]
QUICK_PLANS = [PLANS[number] for number in (0, 2, 3, 4, 6, 8, 9)]
"""Each axis and each mode of recomputation."""


@pytest.mark.parametrize(("family", "plan"), in_quick(PLANS, *QUICK_PLANS))
def test_blocks_multiply_and_send_as_their_formulas_say(family: str, plan: dict[str, Any]) -> None:
    """Each phase by itself, exactly."""
    layers = Layers(family, SMALL | (GROUPED if family == "llama" else {}), **plan)
    mode = plan.get("recompute", "none")
    for kind in ("attention", "mlp"):
        formula, found = layers.by_hand[kind], layers.found[kind]
        expected = {"none": Recomputation(), "selective": formula.selective, "full": formula.full}[mode]
        for part in ("forward", "backward", "weights"):
            assert flops(getattr(found, part)) == flops(getattr(formula, part)), (kind, part)
        assert flops(again(found).operations) == flops(expected.operations)
        assert totals(again(found).transfers) == totals(expected.transfers)
        assert totals(again(found).exchanges) == totals(expected.exchanges)
        for part in ("forward_transfers", "backward_gathers", "backward_transfers"):
            assert totals(getattr(found, part)) == totals(getattr(formula, part)), (kind, part)
        for part in ("forward_exchanges", "backward_exchanges"):
            assert totals(getattr(found, part)) == totals(getattr(formula, part)), (kind, part)


@pytest.mark.parametrize("loss_rows", [None, 70])
def test_a_head_multiplies_as_its_formula_says_and_sends_for_the_loss_too(loss_rows: int | None) -> None:
    """Of the ranks' classes the largest number and two sums, in fp32, of each token."""
    plan = {"tp": 2, "sequence_parallel": "keep", "loss_rows": loss_rows}
    layers = Layers("gpt2", SMALL, **plan)
    formula, found = layers.by_hand["head"], layers.found["head"]
    for part in ("forward", "backward", "weights"):
        assert flops(getattr(found, part)) == flops(getattr(formula, part))
    of_loss = {("all-reduce", "tp"): 3 * 4.0 * ROWS * 64}
    forward, backward = ({}, of_loss) if loss_rows else (of_loss, {})
    assert totals(found.forward_transfers) == totals(formula.forward_transfers) | forward
    assert totals(found.backward_transfers) == totals(formula.backward_transfers) | backward


def test_the_loss_runs_its_operations_one_by_one_also_where_layers_fuse_theirs() -> None:
    """Nobody compiles it: exponentials, the choice of the targets' logits, and the gradient."""
    single, fused = (Layers("gpt2", SMALL, on_cpu=on_cpu).found["head"] for on_cpu in (True, False))
    of_loss = [
        one.forward[max(number for number, other in enumerate(one.forward) if isinstance(other, Product)) :]
        for one in (single, fused)
    ]
    assert of_loss[0] == of_loss[1]
    assert sum(one.kernels for one in of_loss[0] if isinstance(one, Elementwise)) > 4


def test_an_embedding_sums_whole_embeddings_before_it_takes_its_part() -> None:
    """The formula has a reduce-scatter, as other frameworks."""
    layers = Layers("gpt2", SMALL, tp=2, sequence_parallel="keep")
    formula, found = layers.by_hand["embedding"], layers.found["embedding"]
    (scattered,) = formula.forward_transfers
    assert found.forward_transfers == (replace(scattered, collective="all-reduce"),)
    assert found.backward_gathers == formula.backward_gathers


@pytest.mark.parametrize(("family", "factor"), [("gpt2", 2.7), ("llama", 2.2)])
def test_blocks_read_and_write_about_as_much_as_their_formulas_say(family: str, factor: float) -> None:
    """Formulas leave out the gradients of biases, and the copies that join gradients for one product."""
    layers = Layers(family, SMALL | (GROUPED if family == "llama" else {}))
    for kind in ("attention", "mlp"):
        formula, found = layers.by_hand[kind], layers.found[kind]
        assert 0.99 <= nbytes(found.forward) / nbytes(formula.forward) <= 1.35
        assert 1 <= nbytes(found.backward) / nbytes(formula.backward) <= factor


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_recorded_work_of_a_block_takes_as_long_as_its_formula_says(family: str) -> None:
    """Within 4 %, on a CPU as it runs, on a GPU with fused kernels."""
    sizes = LARGE | ({"kv_heads": 8} if family == "llama" else {})
    measured = [(Layers(family, sizes), "cpu-two-cores")]
    for plan in ({}, {"tp": 4, "recompute": "full"}):
        measured.append((Layers(family, sizes, on_cpu=False, **BF16, **plan), "h100-sxm"))
    kinds: tuple[LayerKind, ...] = ("attention", "mlp")
    for (layers, hardware), kind in product(measured, kinds):
        formula, recorded = layers.seconds(hardware, kind)
        assert recorded == pytest.approx(formula, rel=0.04), (hardware, kind)


def described(trace: Trace) -> list[object]:
    """Return the bytes in a trace, without the numbers of storages."""
    phases = [
        (sorted(one.allocated.values()), len(one.saved), one.peak) for one in (trace.forward, trace.backward)
    ]
    return [*phases, trace.weight_peak, trace.output_is_read]


@pytest.mark.parametrize(
    "plan",
    [
        {"recompute": "full", **BF16},
        pytest.param(
            {"tp": 2, "sequence_parallel": "regather", "recompute": "selective"}, marks=pytest.mark.full
        ),
    ],
)
def test_recording_operations_changes_no_trace_of_memory(plan: dict[str, Any]) -> None:
    model = plait.models.llama(**SMALL, **GROUPED)
    tokens = torch.empty(ROWS, 64, dtype=torch.int64)
    found, expected = (traced(model, tokens, one, **plan) for one in (OperationRecorder(), None))
    assert len(found.works) == 4
    assert not expected.works
    assert [*map(described, found.layers)] == [*map(described, expected.layers)]
    assert described(found.loss) == described(expected.loss)


def test_a_model_of_ones_own_is_recorded_and_a_frozen_weight_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)).to("meta")
    model[2].requires_grad_(False)
    first, relu, last = traced(model, torch.empty(ROWS, 8), OperationRecorder()).works
    assert first.forward == (Product(ROWS, 16, 8, result_bytes=4),)
    assert first.backward == ()  # the input needs no gradient
    assert first.weights == (Product(16, 8, ROWS, result_bytes=8),)
    assert relu.forward == (Elementwise(2 * 4 * ROWS * 16),)
    assert relu.backward == (Elementwise(3 * 4 * ROWS * 16),)
    assert last.forward[0] == Product(ROWS, 4, 16, result_bytes=4)
    assert last.backward[-1] == Product(ROWS, 16, 4, result_bytes=4)
    assert last.weights == ()


class Stubborn(torch.autograd.Function):
    """Its backward looks at values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        return (value @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * float(gradient.sum()), gradient


class CallsStubborn(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return Stubborn.apply(input, self.weight)  # type: ignore[no-any-return,no-untyped-call]


def test_a_backward_that_does_not_run_on_meta_is_taken_to_be_that_of_the_forward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), CallsStubborn(8, 8, bias=False)).to("meta")
    _, work = traced(model, torch.empty(ROWS, 8), OperationRecorder()).works
    product, tanh = work.forward[:2]
    assert product == Product(ROWS, 8, 8, result_bytes=4)
    assert work.backward[-2:] == (tanh, product)
    assert work.weights == (Product(8, 8, ROWS, result_bytes=4),)


@pytest.mark.parametrize("family", in_quick(("gpt2", "llama"), "llama"))
def test_a_block_on_the_meta_device_does_what_it_does_on_a_cpu(family: str) -> None:
    """Operation by operation, in an engine's stage."""
    sizes = SMALL | (GROUPED if family == "llama" else {})
    plan, tokens = Plan(), torch.zeros(ROWS, 64, dtype=torch.int64)
    model = getattr(plait.models, family)(**sizes)
    works = traced(getattr(plait.models, family)(**sizes), tokens, OperationRecorder()).works
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    engine.forward_backward(tokens, tokens)
    (stage,) = engine.runtime.pipeline.stages.values()
    for layer in (1, 2):
        recorder = OperationRecorder()
        given = torch.zeros(ROWS, 64, 96, requires_grad=True)
        stage.values[0] = given
        with recorder.recording("forward"):
            stage.forward(0, layer)
        stage.gradients[0] = [torch.zeros_like(given)]
        with recorder.recording("backward"):
            stage.backward_input(0, layer)
        with recorder.recording("weights"):
            stage.backward_weight(0, layer)
        assert recorder.take() == works[layer]
