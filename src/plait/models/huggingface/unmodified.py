"""Refusal of models of transformers that plait's layers would not compute: altered code, other attention.

The layers hold most modules of a model and call them. The code of some they replace (the model, its blocks,
attention, rotary embedding): what a user changed there would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from plait.errors import ModelError, listed
from plait.models.layers.model_validation import refuse_compiled_modules
from plait.tensor.call_hooks import call_hooks, has_own_forward

_LIBRARY = "transformers."


def require_unmodified(model: Any, replaced: Iterable[nn.Module]) -> None:
    """Raise ModelError where a module whose code plait replaces was altered, or computes something else.

    `replaced`: these modules. They are those of the model's own file in transformers, without hooks and with
    the `forward` of their class.
    """
    refuse_compiled_modules(model)
    paths = {id(module): path for path, module in model.named_modules()}
    for module in (model, *replaced):
        place, kind = paths.get(id(module)) or "the model", type(module)
        home = type(model).__module__
        if home.startswith(_LIBRARY) and kind.__module__ != home:
            raise ModelError(
                f"{place} is a {kind.__module__}.{kind.__qualname__}, whose code plait would not run: "
                "give an unmodified model, or write an nn.Sequential of its layers."
            )
        if has_own_forward(module) or not all(_is_of_transformers(hook) for _, hook in call_hooks(module)):
            raise ModelError(
                f"{place} ({kind.__name__}) has hooks or a forward of its own, which plait would not run: "
                "remove them, or put them on a linear, a norm or an MLP."
            )
        if getattr(module, "gradient_checkpointing", False):
            raise ModelError(
                f"activation checkpointing is on in {place}: turn it off on the model, and let the plan "
                'recompute layers, Plan(recompute="full").'
            )
    if getattr(model, "is_quantized", False):
        raise ModelError("the model is quantized, and plait trains the weights themselves: load it without.")
    _require_known_attention(model.config)


def _is_of_transformers(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARY)


def _require_known_attention(config: Any) -> None:
    """Raise ModelError for a function of attention that a user registered. Reads a private attribute."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(config, "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name, None)
    if function is not None and not _is_of_transformers(function):
        raise ModelError(
            f"the model's attn_implementation is {name!r}, a function of {function.__module__}, and plait "
            "computes attention itself: build the model with 'sdpa' or 'eager'."
        )


def require_causal(config: Any, attentions: Iterable[Any], bidirectional: str | None = None) -> None:
    """Raise ModelError for attention to later positions, by the configuration or by a module's attribute.

    `bidirectional`: the value of the configuration that asks for it, beside `is_causal`.
    """
    found = ["is_causal off in config"] if not getattr(config, "is_causal", True) else []
    if bidirectional is not None and getattr(config, bidirectional, None):
        found.append(f"{bidirectional} on in config")
    found += ["is_causal off in an attention" for one in attentions if not getattr(one, "is_causal", True)][
        :1
    ]
    if found:
        raise ModelError(
            f"the model attends to later positions ({found[0]}), where plait adapts causal decoders only: "
            "turn that round."
        )


def require_all_parameters(model: nn.Module, sequence: nn.Module) -> None:
    """Raise ModelError for parameters of `model` that none of the layers in `sequence` holds."""
    held = {id(one) for one in sequence.parameters()}
    others = [name for name, one in model.named_parameters() if id(one) not in held]
    if others:
        raise ModelError(
            f"the model has parameters that its layers do not use ({listed(others, most=4)}): remove them, "
            "or write an nn.Sequential of its layers."
        )
