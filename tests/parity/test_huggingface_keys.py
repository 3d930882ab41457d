"""Values of configurations: each is computed as transformers computes it, or refused, or ignored as there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import plait
from parity import huggingface_cases as cases
from parity.norm import assert_equal
from parity.pairs import in_quick
from plait.errors import ModelError
from plait.models.huggingface import DECODERS, FAMILIES, Family

pytestmark = pytest.mark.transformers

ONE_OF_EACH = ["sliding_attention", "full_attention"]
DEFAULTS: dict[str, Any] = {"hidden_size": 24, "head_dim": 8}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "GPT2LMHeadModel": cases.gpt2,
    "GPTNeoXForCausalLM": cases.gpt_neox,
    **{name: partial(cases._decoder, name.removesuffix("ForCausalLM")) for name in DECODERS},
    "DeepseekV3ForCausalLM": cases.deepseek_v3,
    "GptOssForCausalLM": cases.gpt_oss,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": None},
    "Gemma2ForCausalLM": cases.GEMMA | {"attn_implementation": "eager"},
    "Gemma3ForCausalLM": cases.GEMMA | {"layer_types": ONE_OF_EACH},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2},
    "MixtralForCausalLM": cases.EAGER | {"num_local_experts": 4, "sliding_window": None},
    "OlmoeForCausalLM": cases.EAGER | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 6},
    "Qwen2MoeForCausalLM": cases.EAGER
    | cases.QWEN_EXPERTS
    | {"shared_expert_intermediate_size": 8, "use_sliding_window": True, "sliding_window": 3},
    "Qwen3MoeForCausalLM": cases.EAGER | cases.QWEN_EXPERTS | {"num_experts_per_tok": 2},
}
OF_ONE_KIND = (
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"),
    *("SmolLM3ForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM"),
)
"""Families, of which each reads something that the others do not; the full run has all."""
SPARSE = {name for name, one in DECODERS.items() if one.router != "none"}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **more}}


YARN = {"factor": 2.0, "original_max_position_embeddings": 4}
READ_BY_SOME: list[dict[str, Any]] = [
    {"sliding_window": 3},
    {"sliding_window": None},
    {"sliding_window": 3, "layer_types": ONE_OF_EACH},
    {"sliding_window": 3, "layer_types": ONE_OF_EACH, "use_sliding_window": False},
    {"sliding_window": 3, "layer_types": ONE_OF_EACH, "use_sliding_window": True},
    {"sliding_window": 3, "max_window_layers": 0, "use_sliding_window": True},
    {"layer_types": ["chunked_attention", "full_attention"]},
    {"final_logit_softcapping": 0.5},
    {"attn_logit_softcapping": 0.5},
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"use_parallel_residual": False},
    {"partial_rotary_factor": 0.5},
    {"clip_qkv": 0.3},
    {"norm_topk_prob": True},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [0]},
    {"output_router_logits": True},
    rope("linear", factor=2.0, partial_rotary_factor=0.5),
    rope("proportional", factor=2.0, partial_rotary_factor=0.5),
]
"""What one family reads and another does not: always tried on all."""
FURTHER: list[dict[str, Any]] = [
    *({"sliding_window": value} for value in (0, 1, 8)),
    *({"layer_types": [one, one]} for one in ONE_OF_EACH),
    *({"no_rope_layers": value} for value in ([1, 0], [0, 0])),
    *({"hidden_act": value} for value in ("relu", "gelu_pytorch_tanh", "xielu")),
    *({"num_key_value_heads": value} for value in (1, 4)),
    *({key: True} for key in ("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "qk_norm")),
    *({key: True} for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "is_decoder")),
    *({key: True} for key in ("add_cross_attention", "use_sliding_window", "attn_temperature_tuning")),
    *({key: False} for key in ("scale_attn_weights", "tie_word_embeddings", "attention_bias", "use_cache")),
    *({key: 0.3} for key in ("attention_multiplier", "residual_multiplier", "rotary_pct")),
    *({key: 0.3} for key in ("router_jitter_noise", "router_aux_loss_coef", "input_jitter_noise")),
    *({"num_experts_per_tok": value} for value in (1, 2, 4)),
    *({key: 0} for key in ("num_experts", "num_local_experts")),
    {"output_router_logits": True, "router_aux_loss_coef": 0.0},
    {"mlp_only_layers": [0, 1]},
    {"num_shared_experts": 2},
    *({key: 3} for key in ("logits_scaling", "logit_scale", "embedding_multiplier", "attention_chunk_size")),
    *({key: 3} for key in ("query_pre_attn_scalar", "pretraining_tp", "n_inner", "no_rope_layer_interval")),
    *({key: 0.5} for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "initializer_range")),
    *({key: 0.1} for key in ("attention_dropout", "resid_pdrop", "hidden_dropout", "embd_pdrop")),
    *({key: 50.0} for key in ("rope_theta", "rotary_emb_base", "rope_local_base_freq")),
    {"head_dim": 4},
    {"max_position_embeddings": 16},
    {"sliding_window_pattern": 2},
    rope("default"),
    rope("default", partial_rotary_factor=0.5),
    rope("linear", factor=2.0),
    rope("dynamic", factor=2.0),
    rope("proportional", factor=2.0),
    rope("llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=4),
    rope("yarn", **YARN),
    rope("yarn", **YARN, attention_factor=0.5),
    rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2, beta_fast=4, beta_slow=2, truncate=False),
    *(rope("longrope", short_factor=[1.0] * n, long_factor=[2.0] * n, **YARN) for n in (3, 4)),
    {"rope_parameters": dict(zip(ONE_OF_EACH, (rope("default"), rope("linear", factor=2.0)), strict=True))},
]
REFUSED = {
    "is_causal": set(FAMILIES),
    "use_bidirectional_attention": {"Gemma2ForCausalLM", "Gemma3ForCausalLM"},
    "add_cross_attention": {"GPT2LMHeadModel"},
    "sliding_window": {name for name, one in DECODERS.items() if one.windows != "none"},
    "rope_parameters": set(FAMILIES) - {"GPT2LMHeadModel"},
    "partial_rotary_factor": {"DeepseekV3ForCausalLM"},  # with one angle, which fits any number of features
    "head_dim": {"GptOssForCausalLM"},
    "clip_qkv": {"OlmoeForCausalLM"},
    "hidden_act": SPARSE,
    "router_jitter_noise": {"MixtralForCausalLM"},
}
"""Families that read a value which plait may refuse: sliding_window = 0, angles by the length, and what
counts in training only."""


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(cases.GPT2_VOCAB, (2, cases.GPT2_CONTEXT), generator=generator)


@pytest.fixture(scope="module", autouse=True)
def norms_in_float64() -> Iterator[None]:
    with cases.norms_in_float64():
        yield


@pytest.mark.parametrize(
    ("name", "values"),
    in_quick(
        product(FAMILIES, ("read by some", "further")), *((name, "read by some") for name in OF_ONE_KIND)
    ),
)
def test_a_value_is_computed_as_in_transformers_or_refused(
    name: str, values: str, tokens: torch.Tensor
) -> None:
    for more in READ_BY_SOME if values == "read by some" else FURTHER:
        try:
            model = cases.drawn(partial(build, name, more)).eval()
        except Exception:
            continue  # transformers takes no such value
        expected, found = their_logits(model, tokens), our_logits(model, tokens)
        if isinstance(found, ModelError):
            assert expected is None or any(name in REFUSED.get(key, ()) for key in more), (more, found)
        else:
            assert expected is not None, f"plait computes {more}, for which transformers raises"
            assert_equal({str(more): found}, {str(more): expected}, 1e-12, "the logits")


def build(name: str, more: dict[str, Any]) -> nn.Module:
    return MODELS[name](**copy.deepcopy(OF_FAMILY.get(name, {}) | more))


def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits  # type: ignore[no-any-return]
    except (ValueError, KeyError, RuntimeError, TypeError):
        return None


def our_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor | ModelError:
    try:
        with torch.no_grad():
            return plait.models.from_huggingface(model)(tokens)  # type: ignore[no-any-return]
    except ModelError as error:
        return error


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (cases.gemma2, {"final_logit_softcapping": 0.3, "attn_logit_softcapping": 0.3}),
        (cases.gemma3, {"layer_types": ONE_OF_EACH[::-1]}),
        (cases.qwen3, {"layer_types": ONE_OF_EACH, "sliding_window": 2}),
        (cases.mistral, {"sliding_window": 2}),
        (cases.gpt_neox, {"use_parallel_residual": False}),
    ],
)
def test_a_value_changed_after_construction_counts_where_transformers_reads_it_late(
    family: Any, changes: dict[str, Any], tokens: torch.Tensor
) -> None:
    model: Any = cases.drawn(family).eval()
    model.config = model.base_model.config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(model.config, key, value)
    expected, found = their_logits(model, tokens), our_logits(model, tokens)
    assert expected is not None
    assert isinstance(found, torch.Tensor), found
    assert_equal({"logits": found}, {"logits": expected}, 1e-12, "the value")


def test_a_family_says_which_values_are_read(tokens: torch.Tensor) -> None:
    model = cases.drawn(partial(cases.llama, sliding_window=3, logits_scaling=2.0))
    with pytest.raises(ModelError, match=r"has sliding_window = 3, and the family does not say"):
        plait.models.from_huggingface(model, Family(ignored=("logits_scaling",), windows="none"))
    with pytest.raises(ModelError, match=r"has logits_scaling = 2.0, and the family does not say"):
        plait.models.from_huggingface(model, Family(windows="all"))
    with pytest.raises(ModelError, match=r"Qwen3Attention has q_norm, k_norm, and the family does not say"):
        plait.models.from_huggingface(cases.drawn(cases.qwen3), Family(windows="by type"))
    dropping = cases.drawn(partial(cases.llama, residual_dropout=0.5))
    with pytest.raises(ModelError, match=r"has residual_dropout = 0.5, and the family does not say"):
        plait.models.from_huggingface(dropping, Family(windows="all"))
    ignoring = Family(ignored=("logits_scaling", "sliding_window"))
    assert torch.equal(plait.models.from_huggingface(model, ignoring)(tokens), our_logits(model, tokens))
