"""What plait says and does where transformers is not there, or not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

import plait
from plait.errors import ModelError


def test_importing_plait_imports_neither_transformers_nor_torch_dynamo() -> None:
    """Both take seconds to load."""
    slow = "{'transformers', 'torch._dynamo', 'torch._inductor'}"
    modules = "plait.models, plait.engine.parallelize, plait.app.cli.main"
    code = f"import sys, {modules}; sys.exit(bool({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_from_huggingface_refuses_a_name_in_place_of_a_model() -> None:
    with pytest.raises(ModelError, match="was given 'gpt2': give a model, as transformers' from_pretrained"):
        plait.models.from_huggingface("gpt2")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), type("LlamaForCausalLM", (nn.Linear,), {})(2, 2)])
def test_from_huggingface_refuses_models_of_unknown_families(model: nn.Module) -> None:
    with pytest.raises(ModelError) as refusal:
        plait.models.from_huggingface(model)
    assert str(refusal.value) == (
        f"{type(model).__module__}.{type(model).__qualname__} is no model that plait can adapt: give an "
        "unmodified GPT2LMHeadModel, GPTNeoXForCausalLM, DeepseekV3ForCausalLM, Gemma2ForCausalLM, "
        "Gemma3ForCausalLM, GptOssForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, "
        "Olmo2ForCausalLM, OlmoeForCausalLM, Phi3ForCausalLM, Qwen2ForCausalLM, Qwen2MoeForCausalLM, "
        "Qwen3ForCausalLM, Qwen3MoeForCausalLM, SmolLM3ForCausalLM of transformers, describe its family, or "
        "write an nn.Sequential of its layers."
    )
