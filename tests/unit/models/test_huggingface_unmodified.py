"""Models of transformers that were changed after construction: computed likewise, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from parity import huggingface_cases as cases
from plait.errors import ModelError

pytestmark = pytest.mark.transformers

Change = Callable[[Any], object]


def doubled(module: nn.Module, given: object, output: Any) -> Any:
    return tuple(2 * one for one in output[:1]) + output[1:] if isinstance(output, tuple) else 2 * output


def hook(path: str) -> Change:
    return lambda model: model.get_submodule(path).register_forward_hook(doubled)


def of_another_class(path: str) -> Change:
    def change(model: Any) -> None:
        module = model.get_submodule(path)
        kind = type(module)

        class Changed(kind):  # type: ignore[misc, valid-type]
            def forward(self, *given: Any, **options: Any) -> Any:
                return doubled(self, given, super().forward(*given, **options))

        module.__class__ = Changed

    return change


def own_forward(model: Any) -> None:
    block = model.model.layers[1]
    block.forward = type(block).forward.__get__(block)


def registered_attention(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionMaskInterface.register("of a user", eager_mask)
    AttentionInterface.register("of a user", lambda module, query, *_, **__: (query.transpose(1, 2), None))
    model.config._attn_implementation = "of a user"


def with_config(**values: Any) -> Change:
    return lambda model: vars(model.config).update(values)


ANGLES = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
RUNS = "whose code plait would not run"
HOOKS = "has hooks or a forward of its own, which plait would not run"


@pytest.fixture(autouse=True)
def own_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations of the test's own, which it may change."""
    monkeypatch.setattr(cases, "_CONFIGURATIONS", {})


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (lambda: cases.gpt2(add_cross_attention=True), None, "has cross-attention"),
        (
            lambda: cases.llama(rope_parameters=ANGLES),
            None,
            "of type 'dynamic', and plait computes angles that",
        ),
        (cases.llama, of_another_class(""), "Changed is no model that plait can adapt"),
        (cases.llama, of_another_class("model.layers.0.self_attn"), rf"layers.0.self_attn is a .*, {RUNS}"),
        (cases.gpt2, of_another_class("transformer.h.1"), rf"transformer.h.1 is a .*Changed, {RUNS}"),
        (cases.gpt_neox, of_another_class("gpt_neox.rotary_emb"), rf"gpt_neox.rotary_emb is a .*, {RUNS}"),
        (cases.llama, hook("model"), f"model .LlamaModel. {HOOKS}"),
        (cases.gpt2, hook("transformer.h.0.attn"), f"transformer.h.0.attn .GPT2Attention. {HOOKS}"),
        (cases.olmo2, hook("model.layers.1.self_attn.q_norm"), f"q_norm .Olmo2RMSNorm. {HOOKS}"),
        (cases.gemma3, hook("model.embed_tokens"), f"embed_tokens .*. {HOOKS}"),
        (cases.llama, own_forward, f"model.layers.1 .LlamaDecoderLayer. {HOOKS}"),
        (cases.llama, lambda model: model.compile(), "was given to torch.compile"),
        (cases.llama, lambda model: model.activation_checkpointing_enable(), r'Plan\(recompute="full"\)'),
        (cases.llama, registered_attention, "attn_implementation is 'of a user', a function of"),
        (cases.llama, lambda model: setattr(model, "is_quantized", True), "the model is quantized"),
        (
            cases.llama,
            lambda model: setattr(model, "value", nn.Linear(2, 1)),
            r"\(value.weight, value.bias\)",
        ),
        (cases.llama, with_config(num_hidden_layers=1), r"not use \(model.layers.1.self_attn.q_proj.weight"),
        (
            cases.gemma3,
            with_config(use_bidirectional_attention=True),
            "use_bidirectional_attention on in config",
        ),
        (
            cases.llama,
            lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False),
            "attends to later positions .is_causal off in an attention.",
        ),
    ],
)
def test_modifications_of_a_transformers_model_that_plaits_layers_would_lose_are_refused(
    make: Any, change: Change | None, reason: str
) -> None:
    model = cases.drawn(make)
    if change is not None:
        change(model)
    with pytest.raises(ModelError, match=reason):
        plait.models.from_huggingface(model)


def first_layer_only(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def layers_exchanged(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(list(model.model.layers)))


def resized(model: Any) -> None:
    model.resize_token_embeddings(cases.GPT2_VOCAB + 5, mean_resizing=False)
    model.double()


def head_with_bias(model: Any) -> None:
    model.lm_head = nn.Linear(24, cases.GPT2_VOCAB, bias=True).double()


def once_recorded(model: Any) -> None:
    model(torch.zeros(1, 2, dtype=torch.int64), output_hidden_states=True)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (cases.llama, of_another_class("model.layers.0.mlp")),
        (cases.llama, hook("model.layers.0.self_attn.q_proj")),
        (cases.llama, head_with_bias),
        (cases.llama, once_recorded),
        (cases.qwen3, first_layer_only),
        (cases.gemma3, layers_exchanged),
        (cases.gemma3, resized),
        (cases.gemma3, lambda model: model.model.embed_tokens.embed_scale.mul_(0.5)),
        (cases.smollm3, layers_exchanged),
    ],
)
def test_modified_modules_that_plaits_layers_keep_compute_as_in_transformers(
    make: Any, change: Change
) -> None:
    model = cases.drawn(make).eval()
    change(model)
    tokens = torch.arange(16).view(2, 8) % cases.GPT2_VOCAB
    with torch.no_grad():
        theirs: Tensor = model(tokens).logits
        found: Tensor = plait.models.from_huggingface(model)(tokens)
    assert float((found - theirs).abs().max()) <= 1e-12 * float(theirs.abs().max())
