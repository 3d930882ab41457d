"""`MixtureOfExperts` beside the sparse blocks of transformers, and its options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.norm import assert_equal
from parity.widened import Widened
from plait.errors import ModelError
from plait.models.initial_values import initial_value
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.mixture import MixtureOfExperts
from plait.tensor.experts.routing import Routing
from plait.tensor.running_sequence import ContextParallelism, running

HIDDEN, INNER, EXPERTS, TOP_K, SHARED = 12, 10, 6, 2, 14
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 1,
    "moe_intermediate_size": INNER,
}
SHAPE = (3, 5, HIDDEN)


def qwen2() -> tuple[nn.Module, MixtureOfExperts]:
    models = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = models.Qwen2MoeConfig(**SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=SHARED)
    config._experts_implementation = "eager"
    routing = Routing(normalized=False)
    mixture = plait.MixtureOfExperts(HIDDEN, INNER, EXPERTS, TOP_K, SHARED, shared_gate=True, routing=routing)
    return models.Qwen2MoeSparseMoeBlock(config), mixture


def qwen3() -> tuple[nn.Module, MixtureOfExperts]:
    models = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = models.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True)
    config._experts_implementation = "eager"
    return models.Qwen3MoeSparseMoeBlock(config), plait.MixtureOfExperts(HIDDEN, INNER, EXPERTS, TOP_K)


def deepseek() -> tuple[nn.Module, MixtureOfExperts]:
    models = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = models.DeepseekV3Config(
        **SIZES, n_routed_experts=EXPERTS, n_group=3, topk_group=2, routed_scaling_factor=2.5
    )
    config._experts_implementation = "eager"
    routing = Routing(scores="sigmoid", corrected=True, groups=3, chosen_groups=2, scale=2.5)
    return models.DeepseekV3MoE(config), plait.MixtureOfExperts(
        HIDDEN, INNER, EXPERTS, TOP_K, INNER, routing=routing
    )


def names_of_transformers(mixture: MixtureOfExperts, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a mixture by the names of transformers, where a shared expert's gate is a linear."""
    shared = "shared_expert" if mixture.shared_gate is not None else "shared_experts"
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == "shared.gate_up.weight":
            result |= zip(
                (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"), tensor.chunk(2), strict=True
            )
        elif name == "shared.down.weight":
            result[f"{shared}.down_proj.weight"] = tensor
        elif name == "shared_gate.weight":
            result["shared_expert_gate.weight"] = tensor
        else:
            result[name.replace("router.", "gate.")] = tensor
    return result


@pytest.mark.parametrize("make", [qwen2, qwen3, deepseek])
def test_a_mixture_is_the_sparse_block_of_transformers_in_float64(
    make: Callable[[], tuple[nn.Module, MixtureOfExperts]],
) -> None:
    block, mixture = make()
    block.double(), mixture.double()
    torch.manual_seed(1)
    for tensor in (*mixture.parameters(), *mixture.buffers()):
        nn.init.normal_(tensor, std=0.4)
    block.load_state_dict(names_of_transformers(mixture, mixture.state_dict()))
    found = {}
    for side, module in (("block", block), ("mixture", mixture)):
        torch.manual_seed(2)
        x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
        factors = torch.randn(SHAPE, dtype=torch.float64)
        with Widened():
            output = module(x)
        (output * factors).sum().backward()
        assert x.grad is not None
        gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
        if side == "mixture":
            gradients = names_of_transformers(mixture, gradients)
        found[side] = {"output": output.detach(), "input": x.grad, **gradients}
    assert_equal(found["mixture"], found["block"], 1e-12, "a mixture")


def test_shared_experts_run_after_tokens_are_sent_and_before_they_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixture, log, start = MixtureOfExperts(8, 4, 3, 2, 5), list[str](), Experts.start

    def logged(*given: Any, **more: Any) -> Callable[[], Tensor]:
        log.append("sent")
        finish = start(*given, **more)
        return lambda: (log.append("awaited"), finish())[1]

    monkeypatch.setattr(Experts, "start", logged)
    assert mixture.shared is not None
    mixture.shared.register_forward_hook(lambda *_: log.append("shared"))
    mixture(torch.randn(2, 7, 8))
    assert log == ["sent", "shared", "awaited"]


def test_padding_passes_through_no_expert() -> None:
    mixture, x = MixtureOfExperts(8, 4, 3, 2), torch.randn(1, 5, 8)
    sequence = ContextParallelism.of_one_rank().sequence(
        5, document_bounds(torch.tensor([[4, 4, -1, 7, -1]]))
    )
    with running(sequence):
        found = mixture(x)
    assert found.any(-1).tolist() == [[True, True, False, True, False]]
    torch.testing.assert_close(found[:, [0, 1, 3]], mixture(x)[:, [0, 1, 3]])


def test_a_mixture_that_was_made_has_values_like_those_of_linears() -> None:
    mixture = MixtureOfExperts(64, 32, 8, 2, 16, shared_gate=True, router_bias=True)
    for name, parameter in mixture.named_parameters():
        most = 1 / math.sqrt(parameter.shape[-1])
        if name == "router.bias":
            assert parameter.eq(0).all()
        else:
            assert 0.9 * most < parameter.abs().max() <= most, name
    assert not torch.equal(*mixture.experts.gate_up_proj[:2])


def test_a_mixture_on_meta_is_drawn_whole() -> None:
    routing = Routing(corrected=True)
    mixture = MixtureOfExperts(8, 4, 3, 2, 5, shared_gate=True, routing=routing, device="meta")
    for name, tensor in (*mixture.named_parameters(), *mixture.named_buffers()):
        value = initial_value(mixture, "mlp", name, 0)
        assert value.shape == tensor.shape
        assert bool(value.eq(0).all()) == (name == "router.e_score_correction_bias")


def test_a_mixture_keeps_the_shape_and_dtype_of_its_input() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        mixture = MixtureOfExperts(8, 4, 3, 2, 5, dtype=dtype)
        for shape in ((2, 7, 8), (0, 7, 8), (9, 8)):
            output = mixture(torch.randn(shape, dtype=dtype))
            assert (output.shape, output.dtype) == (shape, dtype)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"inner": 2.0}, r"inner is 2\.0"),
        ({"top_k": 5}, "top_k = 5 experts of a token are to be chosen among 4"),
        ({"shared": -1}, "shared is -1: give a whole number of at least 0"),
        ({"shared_gate": True}, "shared_gate is True, but shared = 0"),
        ({"shared": 2, "shared_gate": 1}, "shared_gate is 1"),
    ],
)
def test_sizes_of_a_mixture_that_do_not_fit_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        MixtureOfExperts(**{"hidden": 8, "inner": 4, "experts": 4, "top_k": 2, **given})
