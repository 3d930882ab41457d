"""Weights of linears that are gathered in float8: the numbers of a run whose linears cast them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import woven
from parity.case import Case
from parity.cases import GPT2_CONTEXT, gpt2
from parity.pairs import in_quick
from plait.engine.blueprint import build_blueprint
from plait.plan.plan import Plan
from plait.schedules.lowering.program import GatherParameters

CASE = gpt2(hidden=64, heads=4)
"""Whose linears multiply in float8, also divided between two ranks; the tied head does not."""
FULL = {"strategy": "full"}
IN_FP32 = {"precision": "fp32", "master_precision": None}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"dp": 2}, FULL),
    "tp": ({"dp": 2, "tp": 2}, FULL),
    "zb-v": ({"dp": 2, "pp": 2, "schedule": "zb-v"}, FULL),
    "regather": (
        {"tp": 2, "sequence_parallel": "regather", **IN_FP32},
        {**FULL, "offload": "parameters"},
    ),
    "optimizer": ({"dp": 2}, {"strategy": "optimizer"}),
    "gradients": ({"dp": 2}, {"strategy": "gradients"}),
    "offload": ({"dp": 2}, {**FULL, "offload": "full"}),
    "offloaded parameters": ({"dp": 2}, {**FULL, "offload": "parameters"}),
    "recomputed": ({"dp": 2, "recompute": "full"}, FULL),
    "compiled": ({"dp": 2, "tp": 2, "compile": "graphs"}, FULL),
    "compiled and recomputed": ({"dp": 2, "compile": "graphs", "recompute": "selective"}, FULL),
    "context": ({"cp": 2}, FULL),
    "fp32": ({"dp": 2, **IN_FP32}, FULL),
}
"""Degrees, and how parameters are sharded besides, where that changes the order of no sum."""


WEIGHTS = [
    f"blocks.{block}.{linear}.weight"
    for block in (0, 1)
    for linear in (*(f"attention.{one}" for one in ("query", "key", "value", "output")), "mlp.up", "mlp.down")
]


def plans_of(name: str) -> tuple[Plan, Plan]:
    """One whose linears cast their weights, and one that gathers them in float8."""
    degrees, sharding = LAYOUTS[name]
    fields = {"precision": "bf16", "master_precision": "bf16", "gradient_precision": "fp32"}
    fields |= {"microbatches": 2, "linears": "float8"}
    return Plan(**fields | degrees), Plan(**fields | degrees | sharding)


def weights_in_float8(plan: Plan) -> list[bool]:
    kinds = build_blueprint(CASE.build(), plan).kinds
    assert not any(kind.scaled for name, kind in kinds.items() if name not in WEIGHTS)
    return [kinds[name].scaled for name in WEIGHTS]


def numbers(case: Case, plan: Plan) -> dict[str, Tensor]:
    """Losses, gradients and parameters of two steps, whole; what is evaluated and generated after.

    Gradients are not clipped by their norm: its squares are summed within each shard, so that its last bits
    depend on how parameters are sharded, also without float8; in fp32 clipped gradients show it.
    The learning rate is a power of two: products with it are exact, so that a step has the same bits in a
    kernel's vectors and in its remainder, which differ in whether they round the product before the sum.
    """
    engine = woven.weave(case, plan)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.125, momentum=0.9)
    rows = 2 * plan.microbatches
    found: dict[str, Tensor] = {}
    first = engine.mesh.index("dp") * rows
    for step, batch in enumerate(case.batches(rows * plan.dp, 2, torch.float32)):
        inputs, targets = (part[first : first + rows] for part in batch)
        found[f"loss {step}"] = engine.forward_backward(inputs, targets).clone()
        found |= {f"gradient {step} {name}": one.clone() for name, one in engine.named_gradients()}
        optimizer.step()
        optimizer.zero_grad()
    found["evaluated"] = engine.evaluate(inputs, targets).clone()
    if plan.cp == 1:
        found["generated"] = engine.generate(inputs[:2, :3], 3, temperature=0)
    return found | engine.state_dict(everywhere=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_gathered_in_float8_give_the_bits_of_weights_that_linears_cast(
    thread_ranks: Any, name: str
) -> None:
    cast, gathered = plans_of(name)
    assert not any(weights_in_float8(cast))
    assert all(weights_in_float8(gathered))
    runs = (thread_ranks.run(numbers, CASE, plan, ranks=plan.world) for plan in (cast, gathered))
    for expected, found in zip(*runs, strict=True):
        assert expected.keys() == found.keys()
        assert [key for key, one in expected.items() if not torch.equal(one, found[key])] == []


@pytest.mark.parametrize(
    ("name", "completion"),
    in_quick(product(("tp", "offload", "zb-v"), ("late", "early", 1)), ("offload", "late")),
)
def test_gathers_in_float8_under_nccl_stream_rules_give_the_bits_of_other_ranks(
    thread_ranks: Any, name: str, completion: Any
) -> None:
    _, plan = plans_of(name)
    expected = thread_ranks.run(numbers, CASE, plan, ranks=plan.world)
    ruled = thread_ranks.under_rules(completion).run(numbers, CASE, plan, ranks=plan.world)
    for one, other in zip(expected, ruled, strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def traffic_over(axis: str, plan: Plan) -> dict[str, tuple[int, int]]:
    """Of a step of this rank: calls and bytes over an axis of each kind."""
    engine = woven.weave(CASE, plan)
    (batch,) = CASE.batches(2 * plan.microbatches, 1, torch.float32)
    engine.forward_backward(*batch)
    return {kind: (one.calls, one.bytes) for kind, one in engine.traffic()[axis].items()}


def test_a_step_gathers_what_linears_hold_in_half_the_bytes_of_16_bit_weights(thread_ranks: Any) -> None:
    """Scales are reduced once a step: 4 bytes a matrix."""
    bytes_of_weights = []
    for linears in (None, "float8"):
        plan = Plan(dp=2, strategy="full", precision="bf16", linears=linears)
        blueprint = build_blueprint(CASE.build(), plan)
        gathers = [one.unit for one in blueprint.programs.train[0] if isinstance(one, GatherParameters)]
        specs = [spec for unit in gathers for spec in blueprint.buffer_specs[unit]]
        traffic, _ = thread_ranks.run(traffic_over, "shard", plan, ranks=2)
        nbytes = sum(spec.whole.nbytes // 2 for spec in specs)
        assert traffic["all_gather"] == (len(specs), nbytes)
        assert traffic.get("all_reduce", (0, 0)) == ((1, 4 * 12) if linears else (0, 0))
        of_linears = [(spec.whole.dtype, slot) for spec in specs for slot in spec.offsets.slots]
        bytes_of_weights.append(
            sum(
                dtype.itemsize * slot.shape.numel() // 2 for dtype, slot in of_linears if slot.name in WEIGHTS
            )
        )
    assert bytes_of_weights == [2 * 2 * 98_304 // 2, 1 * 2 * 98_304 // 2], "each for a forward and a backward"


@pytest.mark.parametrize("mode", in_quick(("keep", "regather"), "regather"))
def test_parts_of_the_sequence_are_gathered_in_float8(thread_ranks: Any, mode: Any) -> None:
    """Inputs of the four regions of two blocks, and their output gradients; once more for `W`."""
    elements = 2 * GPT2_CONTEXT * 64 // 2
    plans = [
        Plan(tp=2, pp=1, sequence_parallel=mode, precision="bf16", linears=linears, overlap=False)
        for linears in (None, "float8")
    ]
    plain, scaled = (thread_ranks.run(traffic_over, "tp", plan, ranks=2)[0]["all_gather"] for plan in plans)
    assert scaled[0] == plain[0]
    again = 8 if mode == "regather" else 0
    assert plain[1] - scaled[1] == (8 + again) * elements
