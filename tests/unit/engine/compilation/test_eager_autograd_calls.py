"""Calls between the graphs of a compiled layer: experts and their choice, whose backward is autograd's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import plait
from parity.pairs import in_quick, in_turns
from plait.engine.compilation import graphs_and_eager_operations
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.expert_products import ExpertCall
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.routing import Routing

WIDTH, LENGTH, MICROBATCHES = 8, 6, 2


class Sparse(nn.Module):
    """A norm and a mixture of experts with a balance loss, perhaps under autocast."""

    def __init__(self, shared: int = 0, autocast: bool = False) -> None:
        super().__init__()
        self.norm, self.autocast = nn.LayerNorm(WIDTH), autocast
        self.mixture = plait.MixtureOfExperts(WIDTH, 12, 4, 2, shared)
        self.mixture.router.balance = Balance(0.5, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return x + self.mixture(self.norm(x)).to(x.dtype)


class Doubled(nn.Module):
    """A weight times two."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def unchanged(model: nn.Sequential) -> None:
    pass


def frozen_but_experts(model: nn.Sequential) -> None:
    """Also the first layer's input needs no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name)


def frozen_experts(model: nn.Sequential) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)


def computed_weights(model: nn.Sequential) -> None:
    """Parameters of experts are no leaves: autograd adds their gradients."""
    for module in list(model.modules()):
        if isinstance(module, Experts):
            parametrize.register_parametrization(module, "down_proj", Doubled())


def model_of(change: Callable[[nn.Sequential], None], dtype: torch.dtype, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Sparse(**options), Sparse(**options)).to(dtype)
    change(model)
    return model


def step(model: Callable[[], nn.Sequential], **options: Any) -> dict[str, Tensor]:
    """Return the gradients after a step, in a rank."""
    made, plan = model(), plait.Plan(microbatches=MICROBATCHES, **options)
    engine = plait.parallelize(made, plan, plait.Mesh(plan), nn.functional.mse_loss)
    dtype = next(made.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * MICROBATCHES, LENGTH, WIDTH, generator=generator, dtype=dtype)
    engine.forward_backward(inputs, inputs.flip(0))
    return {name: one.clone() for name, one in engine.named_gradients()}


def gradients(model: Callable[[], nn.Sequential], **options: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = plait.launch(partial(step, model, **options), ranks=1, ranks_as="threads")[0]
    return found


@pytest.mark.parametrize(
    ("change", "recompute"),
    in_turns(
        {one.__name__: one for one in (frozen_but_experts, frozen_experts, computed_weights)},
        {one: one for one in ("none", "full")},
    ),
)
def test_gradients_of_frozen_and_computed_weights_are_those_of_an_eager_run(
    change: Callable[[nn.Sequential], None], recompute: str
) -> None:
    model = partial(model_of, change, torch.float64, shared=4)
    expected = gradients(model, precision="fp64")
    found = gradients(model, precision="fp64", compile="graphs", recompute=recompute)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("recompute", in_quick(("none", "full"), "full"))
def test_experts_are_computed_under_the_autocast_of_their_layer(recompute: str) -> None:
    model = partial(model_of, unchanged, torch.float32, autocast=True)
    expected = gradients(model)
    found = gradients(model, compile="graphs", recompute=recompute)
    plain = gradients(partial(model_of, unchanged, torch.float32))
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=0.02, atol=0.02 * float(one.abs().max()), msg=name)
    differing = [name for name, one in plain.items() if not torch.equal(found[name], one)]
    assert len(differing) == len(expected)


@pytest.mark.parametrize(
    ("recompute", "products"), in_quick([("none", 1), ("selective", 1), ("full", 2)], ("full", 2))
)
def test_recomputation_repeats_the_first_products_of_experts_and_nothing_else(
    recompute: str, products: int
) -> None:
    """Neither the choice of experts nor their last products, which no backward reads."""
    calls = Counter[str]()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, tensor: Tensor, *others: Any) -> Any:
            calls[name] += not tensor.is_meta  # as in proofs
            return original(self, tensor, *others)

        return counted

    with (
        patch.object(Routing, "choose", counting("choose", Routing.choose)),
        patch.object(ExpertCall, "gate_up", counting("gate_up", ExpertCall.gate_up)),
        patch.object(ExpertCall, "result", counting("result", ExpertCall.result)),
    ):
        gradients(partial(model_of, unchanged, torch.float32), compile="graphs", recompute=recompute)
    runs = 2 * MICROBATCHES
    assert calls == {"choose": runs, "gate_up": products * runs, "result": runs}


@pytest.mark.parametrize("shared", in_quick((0, 4), 4))
def test_a_layer_with_experts_is_two_graphs_forward_and_two_backward(
    monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    """Around the choice of experts and their products, each of which is an operation."""
    made = list[str]()
    for name in ("_graph", "autograd_call", "autograd_call_backward"):
        original = getattr(graphs_and_eager_operations, name)

        def noting(*arguments: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            made.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(graphs_and_eager_operations, name, noting)
    gradients(partial(model_of, unchanged, torch.float32, shared=shared), compile="graphs")
    forward = ["_graph", "autograd_call", "autograd_call", "_graph"]
    backward = ["_graph", "autograd_call_backward", "autograd_call_backward", "_graph"]
    assert made == 2 * (forward + backward)  # the first layer's input needs no gradient
