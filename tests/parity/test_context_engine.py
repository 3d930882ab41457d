"""The engine's other methods under context parallelism: what they return is what one rank returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import woven
from parity.cases import gpt2, llama
from parity.contexts import HIDDEN, Attention, mixing, packed
from parity.sequence_parts import of_length
from plait.plan.plan import Plan

PLANS: dict[str, dict[str, Any]] = {
    "ring": {"cp": 2, "context_parallel": "ring", "pp": 2, "schedule": "zb-h1"},
    "ulysses": {"cp": 3, "context_parallel": "ulysses", "context_layout": "striped", "strategy": "full"},
    "with tp": {"cp": 2, "tp": 2, "sequence_parallel": "keep", "context_layout": "contiguous"},
}
LENGTH, TOLERANCE = 7, 1e-12


def everything(plan: Plan) -> dict[str, Any]:
    case = of_length(llama(layers=1, heads=12, kv_heads=6), LENGTH)
    mesh = plait.Mesh(plan, guarded=True)
    engine = plait.parallelize(case.build(), plan, mesh, case.loss, seed=woven.SEED)
    inputs, targets = woven.shares(case, engine, 1)[0]
    with engine.recording() as recording:
        loss = engine.forward_backward(inputs, targets)
    assert recording.timeline().makespan > 0
    engine.check_replicas()
    return {
        "loss": loss,
        "micro-batches": engine.microbatch_losses(),
        "evaluation": engine.evaluate(inputs, targets),
        "output": engine.output(inputs),
        "gradients": dict(engine.named_gradients()),
        "parameters": engine.state_dict(everywhere=True),
        "tokens": engine.generate(inputs[:, :3], 4),
        "sampled": engine.generate(inputs[:, :2], 3, temperature=0.7, top_k=5, seed=3),
        "finite": engine.non_finite(),
    }


def compare(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            compare(found[name], expected[name], f"{what} of {name}")
    elif expected.is_floating_point():
        difference = (found - expected).abs().max()
        assert difference <= TOLERANCE * expected.abs().max().clamp(min=1.0), f"{what}: {difference}"
    else:
        assert torch.equal(found, expected), what


@pytest.mark.parametrize("name", PLANS)
def test_every_engine_method_under_cp_on_a_guarded_mesh_equals_one_rank(thread_ranks: Any, name: str) -> None:
    plan = Plan(**PLANS[name], microbatches=2, precision="fp64")
    (expected,) = thread_ranks.run(everything, Plan(microbatches=2, precision="fp64"), ranks=1)
    for found in thread_ranks.run(everything, plan, ranks=plan.world):
        compare(found, expected, name)


def outputs_here(plan: Plan) -> tuple[Tensor | None, int]:
    case = packed(gpt2(hidden=24, heads=12), LENGTH)
    engine = woven.weave(case, plan)
    inputs, _ = woven.shares(case, engine, 1)[0]
    output = engine.output(inputs, whole=False, everywhere=False)
    return output, engine.mesh.index("pp")


def test_outputs_stay_on_the_last_stage(thread_ranks: Any) -> None:
    plan = Plan(cp=2, pp=2, microbatches=2, precision="fp64")
    for output, stage in thread_ranks.run(outputs_here, plan, ranks=4):
        assert (output is None) == (stage == 0)
        assert output is None or output.shape == (4, LENGTH, 37)


def gradients_of_inputs(plan: Plan) -> Tensor | None:
    """Of floating-point inputs `[rows, length, hidden]`, as a model of embedded patches has."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(False, None, 6), nn.Linear(HIDDEN, 5)).double()
    engine = plait.parallelize(model, plan, plait.Mesh(plan), loss=plait.cross_entropy)
    inputs = torch.randn(4, LENGTH, HIDDEN, dtype=torch.float64)
    targets = torch.randint(5, (4, LENGTH))
    engine.forward_backward(inputs, targets, input_gradients=True)
    found = engine.input_gradients()
    assert found is None or isinstance(found, Tensor)
    return found


def test_gradients_of_inputs_are_whole(thread_ranks: Any) -> None:
    (expected,) = thread_ranks.run(gradients_of_inputs, Plan(microbatches=2), ranks=1)
    plan = Plan(cp=3, microbatches=2)
    for found in thread_ranks.run(gradients_of_inputs, plan, ranks=3):
        compare(found, expected, "the gradient of the inputs")


def test_micro_batches_of_different_lengths_under_cp_give_the_loss_of_one_rank(thread_ranks: Any) -> None:
    def body(plan: Plan) -> Tensor:
        case = mixing(8, window=3)
        engine = woven.weave(case, plan)
        lengths = (8, 3)
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(37, (2, length), generator=generator) for length in lengths]
        from plait.tensor.microbatches import Microbatches

        return engine.forward_backward(Microbatches(tokens), Microbatches(tokens))

    (expected,) = thread_ranks.run(body, Plan(microbatches=2, precision="fp64"), ranks=1)
    for found in thread_ranks.run(body, Plan(cp=2, microbatches=2, precision="fp64"), ranks=2):
        compare(found, expected, "the loss")
