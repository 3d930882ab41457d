"""Plans for `parallelize_module` read as rules; and that torch's own run of such a plan gives the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import plait
from plait.checkpoint.dtensor import as_dtensor
from plait.errors import PlanError
from plait.models.initial_values import initial_value
from plait.rules import Rule, column, row, vocabulary
from plait.tensor.parallel.torch_parallelize_plan import rules_from_torch

WHOLE = Replicate()


class Block(nn.Module):
    """With all that plans name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.w1, self.w2, self.w3 = (nn.Linear(8, 8, bias=False) for _ in range(3))


def model() -> nn.Sequential:
    names = {"tokens": nn.Embedding(10, 8), "0": Block(), "1": Block(), "output": nn.Linear(8, 10)}
    made = nn.Sequential()
    for name, module in names.items():
        made.add_module(name, module)
    return made


READ: dict[str, tuple[dict[str, ParallelStyle], dict[str, Rule]]] = {
    "column": ({"*.w1": ColwiseParallel()}, {"*.w1": column}),
    "row": ({"*.w2": RowwiseParallel()}, {"*.w2": row}),
    "gathered": (
        {"*.w1": ColwiseParallel(output_layouts=WHOLE)},
        {"*.w1": Rule("column", gather_output=True)},
    ),
    "whole input": (
        {"*.w2": RowwiseParallel(input_layouts=WHOLE)},
        {"*.w2": Rule("row", input_is_parallel=False)},
    ),
    "embedding": ({"tokens": RowwiseParallel(input_layouts=WHOLE)}, {"tokens": vocabulary}),
    "head": ({"output": ColwiseParallel()}, {"output": vocabulary}),
    "head for loss_parallel": ({"output": ColwiseParallel(use_local_output=False)}, {"output": vocabulary}),
    "head, gathered": (
        {"output": ColwiseParallel(output_layouts=WHOLE)},
        {"output": Rule("vocabulary", gather_output=True)},
    ),
    "a sum as a DTensor": ({"0.w2": RowwiseParallel(use_local_output=False)}, {"0.w2": row}),
    "a wildcard in a name": ({"0.w[13]": ColwiseParallel()}, {"0.w1": column, "0.w3": column}),
    "part of a name": ({"1.w*": ColwiseParallel()}, {"1.w1": column, "1.w2": column, "1.w3": column}),
    "prepared": (
        {
            "0": PrepareModuleInput(input_layouts=(WHOLE, None), desired_input_layouts=(WHOLE, None)),
            "1": PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=WHOLE),
            "0.w1": PrepareModuleInputOutput(
                input_kwarg_layouts={"x": WHOLE},
                desired_input_kwarg_layouts={"x": WHOLE},
                output_layouts=WHOLE,
                desired_output_layouts=WHOLE,
            ),
        },
        {},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_torchs_parallel_styles_become_the_equivalent_rules(name: str) -> None:
    plan, rules = READ[name]
    assert rules_from_torch(plan, model()) == rules


def test_one_key_of_a_torch_plan_may_match_linears_and_embeddings() -> None:
    two = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    rules = rules_from_torch({"*": RowwiseParallel(input_layouts=WHOLE)}, two)
    linear = Rule("row", input_is_parallel=False)
    assert rules == {"0": vocabulary, "1": linear, "2": linear}


class Own(ColwiseParallel):
    """A style of somebody's own."""


REFUSED: dict[str, tuple[str, ParallelStyle, str]] = {
    "a sequence": ("0.norm", SequenceParallel(), "0.norm with the style SequenceParallel cuts the sequence"),
    "from a sequence": (
        "0.w1",
        ColwiseParallel(input_layouts=Shard(1)),
        "0.w1 with the style ColwiseParallel has input_layouts = S(1), but in plait the input of a column",
    ),
    "to a sequence": (
        "*.w2",
        RowwiseParallel(output_layouts=Shard(1)),
        "0.w2 with the style RowwiseParallel has output_layouts = S(1), but in plait the sum is whole",
    ),
    "another dim": ("0.w1", ColwiseParallel(output_layouts=Shard(1)), "give Shard(-1) or Replicate()"),
    "a summand": ("0.w2", RowwiseParallel(input_layouts=Partial()), "give Shard(-1) or Replicate()"),
    "a global view": (
        "0.w1",
        ColwiseParallel(use_local_output=False),
        "0.w1 with the style ColwiseParallel has use_local_output = False, but in plait the output",
    ),
    "features of a table": ("tokens", ColwiseParallel(), "give RowwiseParallel(input_layouts=Replicate())"),
    "cut tokens": ("tokens", RowwiseParallel(), "tokens with the style RowwiseParallel has input_layouts"),
    "a norm": ("0.norm", ColwiseParallel(), "0.norm has the style ColwiseParallel, but is a LayerNorm"),
    "a style of one's own": ("0.w1", Own(), "0.w1 has the style Own, which plait cannot read"),
    "an input": (
        "0",
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=WHOLE),
        "0 with the style PrepareModuleInput turns S(1) into R (input_layouts)",
    ),
    "a named input": (
        "0",
        PrepareModuleInput(input_kwarg_layouts={"x": WHOLE}, desired_input_kwarg_layouts={"x": Shard(1)}),
        "turns R into S(1) (input_layouts)",
    ),
    "an output": (
        "0",
        PrepareModuleInputOutput(output_layouts=WHOLE, desired_output_layouts=Shard(1)),
        "0 with the style PrepareModuleOutput turns R into S(1) (output_layouts)",
    ),
    "no module": ("0.w4", ColwiseParallel(), "the rule '0.w4' matches no module of the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_torchs_parallel_styles_without_an_equivalent_rule_are_refused(name: str) -> None:
    key, style, sentence = REFUSED[name]
    with pytest.raises(PlanError, match=re.escape(sentence)):
        rules_from_torch({key: style}, model())


def llama_plan() -> dict[str, ParallelStyle]:
    """As torchtitan's for its Llama, without sequence parallelism."""
    return {
        "embedding.token": RowwiseParallel(input_layouts=WHOLE, output_layouts=WHOLE),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=WHOLE, desired_input_layouts=WHOLE, use_local_output=True
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=WHOLE),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=WHOLE),
        "head.output": ColwiseParallel(input_layouts=WHOLE, output_layouts=WHOLE),
    }


def small_llama() -> nn.Sequential:
    """On real tensors, float64, the same on every rank."""
    made = plait.models.llama(layers=2, hidden=16, heads=4, kv_heads=2, inner=24, vocab=36, context=8)
    values = {}
    for path, layer in (("embedding", made.embedding), ("head", made.head)):
        values |= {f"{path}.{n}": initial_value(layer, path, n, 5) for n, _ in layer.named_parameters()}
    for block, pair in enumerate(made.blocks):
        for part, layer in pair.named_children():
            path = f"blocks.{block}.{part}"
            values |= {f"{path}.{n}": initial_value(layer, path, n, 5) for n, _ in layer.named_parameters()}
    made.load_state_dict({name: value.double() for name, value in values.items()}, assign=True)
    return made.requires_grad_()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(36, (4, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients_by_torch() -> dict[str, Tensor]:
    made = parallelize_module(small_llama(), init_device_mesh("cpu", (2,)), llama_plan())
    tokens, targets = batch()
    functional.cross_entropy(made(tokens).flatten(0, 1), targets.flatten()).backward()
    found = {}
    for name, parameter in made.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def gradients_by_plait() -> dict[str, Tensor]:
    made, plan = small_llama(), plait.Plan(tp=2, precision="fp64")
    rules = rules_from_torch(llama_plan(), made)
    mesh = plait.Mesh(plan)
    engine = plait.parallelize(made, plan, mesh, plait.cross_entropy, rules=rules)
    engine.forward_backward(*batch())
    found = {}
    for name, parameter in engine.named_parameters():
        assert parameter.grad is not None
        layout = engine.layouts[name]
        found[name] = as_dtensor(parameter.grad, layout, mesh).full_tensor()
    return found


def test_plait_computes_what_torch_does_with_the_plan(rank_pool: Any) -> None:
    """And what one device does."""
    alone = small_llama()
    tokens, targets = batch()
    functional.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten()).backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in alone.parameters())
    for woven in (gradients_by_torch, gradients_by_plait):
        for found in rank_pool.run(woven, ranks=2):
            assert found.keys() == dict(alone.named_parameters()).keys()
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-13 * largest + 1e-16)
