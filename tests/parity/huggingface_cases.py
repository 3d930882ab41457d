"""Small models of transformers with random values, and the cases made of them.

transformers is imported when a model is built: that takes seconds, for which no other test has to wait.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import plait
from parity.case import SEED, Case
from parity.cases import GPT2_CONTEXT, GPT2_VOCAB, draw_contexts

Sizes = dict[str, Any]
SIZES: Sizes = {"vocab_size": GPT2_VOCAB, "max_position_embeddings": GPT2_CONTEXT, "num_hidden_layers": 2}


def gpt2(heads: int = 4, **more: Any) -> nn.Module:
    sizes = {
        "vocab_size": GPT2_VOCAB,
        "n_positions": GPT2_CONTEXT,
        "n_layer": 2,
        "n_embd": 24,
        "n_head": heads,
    }
    dropouts = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return _model("GPT2LMHeadModel", "GPT2Config", {**sizes, **dropouts, **more})


def _model(model: str, config: str, sizes: Sizes) -> nn.Module:
    """The class `model` of transformers, built from its class `config` with `sizes`."""
    import transformers

    made = getattr(transformers, config)(**copy.deepcopy(sizes))  # it writes to dictionaries that it is given
    built: nn.Module = getattr(transformers, model)(_CONFIGURATIONS.setdefault(f"{config} {sizes}", made))
    return built


_CONFIGURATIONS: dict[str, Any] = {}
"""By class and sizes: layers of one object share their runs on the meta device, also between ranks."""


def _llama_like(family: str, heads: int = 4, kv_heads: int = 2, **more: Any) -> nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": heads}
    sizes = {**SIZES, **sizes, "num_key_value_heads": kv_heads, **more}
    return _model(f"{family}ForCausalLM", CONFIGURATIONS.get(family, f"{family}Config"), sizes)


CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig"}


llama = partial(_llama_like, "Llama")
qwen2 = partial(_llama_like, "Qwen2")
mistral = partial(_llama_like, "Mistral", sliding_window=3)


def gpt_neox(heads: int = 4, **more: Any) -> nn.Module:
    sizes = {"hidden_size": 48, "intermediate_size": 20, "num_attention_heads": heads}
    return _model("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, **sizes, **more})


def _decoder(family: str, heads: int = 4, kv_heads: int = 2, **more: Any) -> nn.Module:
    """One without tokens that the small vocabulary lacks."""
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None)
    return _llama_like(family, heads, kv_heads, **tokens, **more)


qwen3 = partial(_decoder, "Qwen3", head_dim=8, use_sliding_window=True, sliding_window=3, max_window_layers=1)
GEMMA = {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 6}
gemma2 = partial(
    _decoder,
    "Gemma2",
    **GEMMA,
    attn_logit_softcapping=1.5,
    final_logit_softcapping=2.0,
    attn_implementation="eager",
)
gemma3 = partial(_decoder, "Gemma3", **GEMMA, layer_types=["sliding_attention", "full_attention"])
"""With a base of the rotary embedding for each type of layer."""
phi3 = partial(_decoder, "Phi3", sliding_window=3)
olmo2 = partial(_decoder, "Olmo2")
smollm3 = partial(_decoder, "SmolLM3", no_rope_layer_interval=2)


EAGER = {"experts_implementation": "eager"}
"""By default transformers computes experts in a way that refuses float64."""


def _sparse(family: str, heads: int = 4, kv_heads: int = 2, **more: Any) -> nn.Module:
    return _decoder(family, heads, kv_heads, **EAGER | more)


mixtral = partial(_sparse, "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=3)
QWEN_EXPERTS = {"num_experts": 5, "moe_intermediate_size": 12}
qwen2_moe = partial(
    _sparse, "Qwen2Moe", **QWEN_EXPERTS, num_experts_per_tok=2, shared_expert_intermediate_size=16
)
qwen3_moe = partial(
    _sparse, "Qwen3Moe", **QWEN_EXPERTS, head_dim=8, num_experts_per_tok=3, norm_topk_prob=True
)
olmoe = partial(_sparse, "Olmoe", num_experts=16, num_experts_per_tok=8)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 4}
gpt_oss = partial(
    _sparse,
    "GptOss",
    head_dim=8,
    sliding_window=3,
    num_local_experts=5,
    num_experts_per_tok=2,
    swiglu_limit=0.3,
    rope_parameters={**YARN, "truncate": False},
    attn_implementation="eager",
)
"""With a sliding window in the first layer; only the eager attention has sinks on a CPU."""


def deepseek_v3(heads: int = 4, kv_heads: int = 4, **more: Any) -> nn.Module:
    sizes = {
        "q_lora_rank": 10,
        "kv_lora_rank": 6,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        "attn_implementation": "eager",
    }
    model = _sparse("DeepseekV3", heads, heads, **{**sizes, **more})
    for name, correction in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            correction.copy_(torch.linspace(-0.1, 0.1, len(correction)).roll(3))
    return model


@contextmanager
def norms_in_float64() -> Iterator[None]:
    """Norms and routers with float64 in the code of transformers where it has float32.

    In float32 they sum gradients, or here mean squares over ranks, whose order then shows in float64 runs.
    Gemma 2's capped scores likewise: only the eager attention, which takes the softmax in float32, has them.
    """
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm, OlmoeTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

    norms = (Gemma2RMSNorm, Gemma3RMSNorm, Olmo2RMSNorm, OlmoeRMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm)
    more_norms = (GptOssRMSNorm, modeling_deepseek_v3.DeepseekV3RMSNorm)
    routers = (MixtralTopKRouter, OlmoeTopKRouter, Qwen2MoeTopKRouter, Qwen3MoeTopKRouter)
    with ExitStack() as entered:
        for kind in (*norms, *more_norms, *routers, modeling_deepseek_v3.DeepseekV3TopkRouter):
            entered.enter_context(patch.object(kind, "forward", in_float64(kind.forward)))
        for module in (modeling_gemma2, modeling_deepseek_v3):
            eager = in_float64(module.eager_attention_forward)
            entered.enter_context(patch.object(module, "eager_attention_forward", eager))
        yield


def in_float64(function: Any) -> Any:
    """The function with float64 in its code where it has float32."""
    written = inspect.getsource(function)
    changed = re.sub(r"torch\.float(32)?\b", "torch.float64", written).replace(".float()", ".double()")
    assert changed != written
    found: dict[str, Any] = {}
    exec(textwrap.dedent(changed), vars(sys.modules[function.__module__]), found)
    return found[function.__name__]


def load() -> None:
    """Import transformers on a rank: this takes longer than all that comes after it."""
    llama()


SPARSE: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "mixtral-one-expert-a-token": partial(mixtral, num_experts_per_tok=1),
    "qwen2-moe": qwen2_moe,
    "qwen2-moe-partly-dense": partial(qwen2_moe, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-partly-dense": partial(qwen3_moe, decoder_sparse_step=2, norm_topk_prob=False),
    "olmoe": olmoe,
    "gpt-oss": gpt_oss,
    "gpt-oss-full": partial(gpt_oss, layer_types=["full_attention"] * 2, attention_bias=False),
    "deepseek-v3": deepseek_v3,
    "deepseek-v3-one-query-latent": partial(
        deepseek_v3, q_lora_rank=None, rope_interleave=False, attention_bias=True, norm_topk_prob=False
    ),
}
"""With mixtures of experts."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2-untied-scaled": partial(gpt2, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
    "llama": llama,
    "llama-tied-biased": partial(llama, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-scaled": partial(
        llama,
        head_dim=4,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4,
        },
    ),
    "qwen2": qwen2,
    "qwen2-sliding": partial(qwen2, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "mistral": mistral,
    "gpt-neox": gpt_neox,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3-capped-untied": partial(gemma3, final_logit_softcapping=2.0, tie_word_embeddings=False),
    "phi3": phi3,
    "phi3-partly-rotated": partial(phi3, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "olmo2": olmo2,
    "smollm3": smollm3,
    **SPARSE,
    "gpt-neox-in-turn": partial(gpt_neox, use_parallel_residual=False, attention_bias=False),
}


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "gpt2": partial(gpt2, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "llama": partial(llama, attention_dropout=0.1),
    "qwen2": partial(qwen2, attention_dropout=0.1),
    "mistral": partial(mistral, attention_dropout=0.1),
    "phi3": partial(phi3, attention_dropout=0.1, resid_pdrop=0.1),
    "gpt-neox": partial(gpt_neox, attention_dropout=0.1, hidden_dropout=0.1),
}
"""With dropout; GPT-2's is that of its configuration."""


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in float64, every parameter drawn anew: none is zero or one, as biases and norms begin."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model = make().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
    return model


def case(name: str, make: Callable[[], nn.Module] | None = None) -> Case:
    """The family's model as plait's layers."""

    def build() -> nn.Module:
        return plait.models.from_huggingface(drawn(make or MODELS[name]))

    return Case(name, build, draw_contexts(GPT2_VOCAB))
