"""`Router` beside the gates of transformers; ties, 16 bits and given experts, where they differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from parity.norm import assert_equal
from parity.widened import Widened
from plait.engine.pipeline.recompute import recomputing
from plait.errors import ModelError
from plait.plan.plan import Recompute
from plait.tensor.experts.router import Router, wide_linear
from plait.tensor.experts.routing import Routing, balanced_indices

HIDDEN, EXPERTS, TOKENS, TOP_K = 12, 16, 50, 4
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_hidden_layers": 1}
MARGIN = 1e-5


def mixtral() -> nn.Module:
    models = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    return models.MixtralTopKRouter(models.MixtralConfig(**SIZES, num_local_experts=EXPERTS))


def qwen2(normalized: bool) -> nn.Module:
    models = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = models.Qwen2MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=normalized)
    return models.Qwen2MoeTopKRouter(config)


def qwen3(normalized: bool) -> nn.Module:
    models = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = models.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=normalized)
    return models.Qwen3MoeTopKRouter(config)


def olmoe(normalized: bool) -> nn.Module:
    models = pytest.importorskip("transformers.models.olmoe.modeling_olmoe")
    config = models.OlmoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=normalized)
    return models.OlmoeTopKRouter(config)


def gpt_oss() -> nn.Module:
    models = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    return models.GptOssTopKRouter(models.GptOssConfig(**SIZES, num_local_experts=EXPERTS))


def deepseek(normalized: bool, groups: int, chosen: int) -> nn.Module:
    models = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = models.DeepseekV3Config(
        **SIZES,
        n_routed_experts=EXPERTS,
        n_group=groups,
        topk_group=chosen,
        norm_topk_prob=normalized,
        routed_scaling_factor=2.5,
    )
    return models.DeepseekV3TopkRouter(config)


def of_deepseek(normalized: bool, groups: int, chosen: int) -> Routing:
    return Routing(
        scores="sigmoid",
        normalized=normalized,
        corrected=True,
        groups=groups,
        chosen_groups=chosen,
        scale=2.5,
    )


GATES: dict[str, tuple[Callable[[], nn.Module], Routing]] = {
    "mixtral": (mixtral, Routing()),
    "qwen2-moe": (partial(qwen2, False), Routing(normalized=False)),
    "qwen3-moe": (partial(qwen3, True), Routing()),
    "olmoe": (partial(olmoe, False), Routing(normalized=False)),
    "gpt-oss": (gpt_oss, Routing(scores="softmax_of_chosen")),
    "deepseek-v3": (partial(deepseek, True, 4, 2), of_deepseek(True, 4, 2)),
    "deepseek-v3, not normalized": (partial(deepseek, False, 8, 3), of_deepseek(False, 8, 3)),
    "deepseek-v3, one group": (partial(deepseek, True, 1, 1), of_deepseek(True, 1, 1)),
}


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, Router]:
    """A gate of transformers with random parameters, and a router with the same."""
    make, routing = GATES[name]
    gate = make().to(dtype)
    torch.manual_seed(3)
    for tensor in (*gate.parameters(), *gate.buffers()):
        nn.init.normal_(tensor, std=0.3)
    router = Router(HIDDEN, EXPERTS, TOP_K, routing=routing, bias="bias" in gate.state_dict()).to(dtype)
    router.load_state_dict(gate.state_dict())
    return gate, router


def ran(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Experts by number, their weights in that order, and logits, input and all gradients by name."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    logits, weights, indices = module(hidden)
    indices, order = indices.sort(-1)
    weights = weights.gather(-1, order)
    factors = torch.randn(EXPERTS + 1, generator=generator, dtype=torch.float64).to(dtype)
    (weights * factors[indices]).sum().add(logits.sum() * factors[-1]).backward()
    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    assert hidden.grad is not None
    return indices, weights.detach(), {"logits": logits.detach(), "hidden": hidden.grad, **gradients}


@pytest.mark.parametrize("name", GATES)
def test_a_router_is_the_gate_of_transformers_in_float64(name: str) -> None:
    gate, router = pair(name, torch.float64)
    with Widened():
        expected = ran(gate, torch.float64)
    found = ran(router, torch.float64)
    assert torch.equal(found[0], expected[0])
    assert_equal({"weights": found[1]}, {"weights": expected[1]}, 1e-12, name)
    assert_equal(found[2], expected[2], 1e-12, name)
    assert set(found[2]) == {"logits", "hidden", *dict(gate.named_parameters())}


@pytest.mark.parametrize("name", GATES)
def test_a_router_chooses_the_experts_of_transformers_in_float32(name: str) -> None:
    gate, router = pair(name, torch.float32)
    expected, found = ran(gate, torch.float32), ran(router, torch.float32)
    clear = margins(name) > MARGIN
    assert clear.sum() > 0.9 * TOKENS
    assert torch.equal(found[0][clear], expected[0][clear])
    torch.testing.assert_close(found[1][clear], expected[1][clear], rtol=1e-5, atol=1e-6)


def margins(name: str) -> Tensor:
    """Of each token, how far its last expert is from the first that is not chosen, in float64; one group."""
    _, router = pair(name, torch.float64)
    routing, generator = router.routing, torch.Generator().manual_seed(4)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    scores = routing.scores_of(wide_linear(hidden, router.weight, router.bias)).detach()
    if router.e_score_correction_bias is not None:
        scores += router.e_score_correction_bias
    if routing.groups == 1:
        ordered = scores.sort(-1, descending=True).values
        return ordered[:, TOP_K - 1] - ordered[:, TOP_K]
    of_groups = scores.view(TOKENS, routing.groups, -1).topk(2, -1).values.sum(-1).sort(-1).values
    between_groups = of_groups.diff(dim=-1)[:, -routing.chosen_groups]
    within = scores.sort(-1).values.diff(dim=-1).amin(-1)
    return torch.minimum(between_groups, within)


def test_equal_scores_go_to_the_experts_of_the_lowest_numbers() -> None:
    router = Router(HIDDEN, 256, 8)
    nn.init.zeros_(router.weight)
    _, _, indices = router(torch.randn(TOKENS, HIDDEN))
    assert indices.tolist() == [list(range(8))] * TOKENS


def test_equal_groups_go_to_the_lowest_numbers() -> None:
    routing = Routing(scores="sigmoid", groups=64, chosen_groups=3)
    indices = routing.choose(torch.ones(5, 256), None, 6)
    assert indices.tolist() == [list(range(6))] * 5


def test_a_correction_chooses_experts_and_does_not_change_their_weights() -> None:
    routing = Routing(scores="sigmoid", corrected=True, normalized=False)
    scores = torch.tensor([[0.9, 0.8, 0.1]])
    indices = routing.choose(scores, torch.tensor([0.0, 0.0, 1.0]), 2)
    assert indices.tolist() == [[2, 0]]
    assert routing.weights(scores, indices).tolist() == [[pytest.approx(0.1), pytest.approx(0.9)]]


def test_sixteen_bits_are_scored_in_float32() -> None:
    """In bfloat16 the two logits are one number, and the second expert would not be chosen."""
    router = Router(2, 2, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 1.0], [1.0, 1.0078125]]))
    logits, weights, indices = router(torch.tensor([[128.0, 1.0]], dtype=torch.bfloat16))
    assert (logits.dtype, weights.dtype) == (torch.float32, torch.bfloat16)
    assert logits.tolist() == [[129.0, 129.0078125]]
    assert indices.tolist() == [[1]]


def test_autocast_does_not_narrow_logits() -> None:
    router, hidden = Router(HIDDEN, EXPERTS, TOP_K), torch.randn(TOKENS, HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(hidden)[0], router(hidden)[0].float())
        narrow = router(hidden.bfloat16())
    assert narrow[0].dtype == torch.float32
    torch.testing.assert_close(narrow[0], router(hidden.bfloat16().float())[0])


def test_gradients_of_sixteen_bits_are_those_of_float32_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(5, 6, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
    wide = [one.detach().float().requires_grad_() for one in narrow]
    factors = torch.randn(5, 5, generator=generator)
    (wide_linear(narrow[0], narrow[1], None) * factors).sum().backward()
    (wide_linear(wide[0], wide[1], None) * factors).sum().backward()
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad.bfloat16())


def test_one_normalized_expert_has_weight_one_and_the_router_no_gradient() -> None:
    router = Router(HIDDEN, EXPERTS, 1).double()
    _, weights, _ = router(torch.randn(TOKENS, HIDDEN, dtype=torch.float64))
    (weights * torch.linspace(0, 1, TOKENS)[:, None]).sum().backward()
    assert weights.eq(1).all()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() < 1e-14


def test_given_experts_take_the_weights_of_their_scores() -> None:
    router, hidden = Router(HIDDEN, EXPERTS, TOP_K), torch.randn(TOKENS, HIDDEN)
    own = router(hidden)
    router.given = lambda scores: own[2].flip(-1)
    torch.testing.assert_close(router(hidden)[1], own[1].flip(-1))
    router.given = lambda scores: balanced_indices(torch.arange(len(scores)), EXPERTS, TOP_K)
    counts = router(hidden)[2][:EXPERTS].flatten().bincount(minlength=EXPERTS)
    assert counts.eq(TOP_K).all()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.zeros(TOKENS, TOP_K), r"torch\.float32 \[50, 4\]: give torch\.int64 \[50, 4\]"),
        (torch.zeros(TOKENS, 3, dtype=torch.int64), r"torch\.int64 \[50, 3\]: give torch\.int64 \[50, 4\]"),
    ],
)
def test_given_experts_of_another_shape_or_dtype_are_refused(given: Tensor, told: str) -> None:
    router = Router(HIDDEN, EXPERTS, TOP_K)
    router.given = lambda scores: given
    with pytest.raises(ModelError, match=told):
        router(torch.randn(TOKENS, HIDDEN))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_repeats_the_choice_of_the_first_run(mode: Recompute) -> None:
    """Experts are given, others each time: the backward has to be that of the first."""
    router, hidden = Router(HIDDEN, EXPERTS, TOP_K), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    draws: list[Tensor] = []

    def draw(scores: Tensor) -> Tensor:
        draws.append(torch.rand(scores.shape).topk(TOP_K).indices)
        return draws[-1]

    router.given = draw

    def run(hidden: Tensor) -> Tensor:
        _, weights, indices = router(hidden)
        return weights * (indices + 1.0)

    run_again = recomputing(mode, run, list(router.parameters()), decides=True)
    for step in range(3):  # the layer learns from each backward what it keeps
        run_again(hidden).square().sum().backward()
        gradient, hidden.grad = hidden.grad, None
        assert len(draws) == step + 1
        router.given = lambda scores: draws[-1]
        run(hidden).square().sum().backward()
        router.given = draw
        assert gradient is not None
        assert hidden.grad is not None
        torch.testing.assert_close(gradient, hidden.grad)
        hidden.grad = None


def test_a_router_on_meta_has_the_shapes_and_dtypes_of_one_with_values() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for device in ("cpu", "meta"):
            routing = Routing(scores="sigmoid", corrected=True, groups=4, chosen_groups=2)
            router = Router(HIDDEN, EXPERTS, TOP_K, routing=routing, bias=True, device=device, dtype=dtype)
            results.append(router(torch.zeros(TOKENS, HIDDEN, device=device, dtype=dtype)))
        for one, other in zip(*results, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
