"""Unmodified models of Hugging Face's transformers as sequences of layers, which plait can parallelize.

The layers hold the model's own modules (embeddings, linears, norms, activations), under the same names,
neither copied nor altered. Only residual connections, positions and causal attention are plait's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models.huggingface.common import Branch, require_all_parameters
from plait.models.huggingface.families import DECODERS, Family, adapt, require_declared
from plait.models.huggingface.gpt import adapt_gpt2, adapt_gpt_neox

__all__ = ["DECODERS", "FAMILIES", "Branch", "Family", "from_huggingface"]

FAMILIES: Mapping[str, Callable[[Any], nn.Sequential]] = {
    "GPT2LMHeadModel": adapt_gpt2,
    "GPTNeoXForCausalLM": adapt_gpt_neox,
    **{name: partial(adapt, family=family) for name, family in DECODERS.items()},
}
"""Converters by class name of transformers, which may not be installed."""


_EXPERTS = (
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
    *("num_routed_experts", "n_experts"),
)
"""Names of the number of experts in configurations of transformers."""


def from_huggingface(model: nn.Module, family: Family | None = None) -> nn.Sequential:
    """Return `model` as a sequence embedding → blocks.0.attention → blocks.0.mlp → … → head.

    Tokens `[batch, length ≤ context]` → logits `[batch, length, vocab]`. The layers hold the modules of
    `model` itself, unchanged; a model on the meta device gets values by name and seed, from the distributions
    of transformers. The sequence has `context` and `rules`, as plait's own models have, and
    `huggingface_names`, which maps each name of its `state_dict()` to that of `model`. `family`: a
    description of a decoder that plait does not know; without one ModelError for other classes, and always
    for settings that plait does not support.
    """
    if isinstance(model, str):
        raise ModelError(
            f"from_huggingface was given {model!r}: give a model, as transformers' "
            f"from_pretrained({model!r}) returns."
        )
    kind = type(model)
    if family is not None:
        if family != DECODERS.get(kind.__name__):
            require_declared(model.config, family)
        return _with_names(adapt(model, family), model)
    known = FAMILIES if kind.__module__.startswith("transformers.") else {}
    if kind.__name__ not in known and (experts := _experts(model)):
        raise ModelError(
            f"{kind.__qualname__} is a mixture of experts ({experts} in its configuration), whose router "
            f"plait does not know: give a model of {', '.join(FAMILIES)}, or describe its family."
        )
    if kind.__name__ not in known:
        raise ModelError(
            f"{kind.__module__}.{kind.__qualname__} is no model that plait can adapt: give an unmodified "
            f"{', '.join(FAMILIES)} of transformers, describe its family, or write an nn.Sequential of its "
            "layers."
        )
    return _with_names(known[kind.__name__](model), model)


def _experts(model: nn.Module) -> str:
    """Return the first size of a configuration that counts several experts, with its value, or ""."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    sizes = ((name, getattr(config, name, None)) for name in _EXPERTS)
    return next((f"{name} = {size}" for name, size in sizes if isinstance(size, int) and size > 1), "")


def _with_names(sequence: nn.Sequential, model: nn.Module) -> nn.Sequential:
    require_all_parameters(model, sequence)
    sequence.huggingface_names = _names(sequence, model)  # type: ignore[assignment]
    return sequence


def _names(sequence: nn.Sequential, model: nn.Module) -> dict[str, str]:
    """Return for each name in the `state_dict()` of `sequence` the corresponding name in that of `model`.

    The last two parts of a name (module and attribute) are equal in both.
    """
    theirs: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        theirs.setdefault(id(tensor), []).append(name)
    return {
        name: next(other for other in theirs[id(tensor)] if other.split(".")[-2:] == name.split(".")[-2:])
        for name, tensor in sequence.state_dict(keep_vars=True).items()
    }
