"""`ModelSizes`: the sizes of plait's own `gpt2` and `llama`, read from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from plait.checkpoint.manifest import Manifest, TensorEntry, section
from plait.errors import CheckpointError

_BLOCK = re.compile(r"model\.blocks\.(\d+)\.attention\.norm\.weight")
_TOKEN, _POSITION = "model.embedding.token.weight", "model.embedding.position.weight"
Number = int | float


@dataclass(frozen=True)
class ModelSizes:
    """The arguments of `gpt2` or `llama`."""

    family: Literal["gpt2", "llama"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Equal to `heads` in GPT-2."""
    inner: int
    """4 · hidden in GPT-2."""
    vocab: int
    context: int
    tied: bool
    rope_base: float = 10000.0
    """Llama only."""


def sizes_from_manifest(
    manifest: Manifest,
    *,
    heads: int | None = None,
    context: int | None = None,
    rope_base: float | None = None,
) -> ModelSizes:
    """Return the sizes of the model in a checkpoint.

    Most follow from shapes. The number of heads, and for Llama the context and the base of the rotary
    embedding, are read from the state that `plait train` or an import saved, or must be given.
    Raises CheckpointError for another model, and where a size is unknown or contradicts the one given.
    """
    tensors = manifest.tensors
    blocks = {int(found[1]) for name in tensors if (found := _BLOCK.fullmatch(name))}
    first = "model.blocks.0.{}.weight".format
    needed = {_TOKEN, first("attention.key"), first("mlp.up"), *({_POSITION} & tensors.keys())}
    if not all(name in tensors and len(tensors[name].shape) == 2 for name in needed):
        raise CheckpointError(
            "the checkpoint is of no gpt2 or llama of plait's own: if it is of a model of Hugging Face, give "
            "the folder of that model."
        )
    vocab, hidden = tensors[_TOKEN].shape
    state = section(manifest.state, "sizes") or section(manifest.state, "config", "model")
    saved = {name: value for name, value in state.items() if isinstance(value, Number) and isfinite(value)}
    heads = int(_one("heads", heads, saved, None))
    is_gpt2 = _POSITION in tensors
    default = tensors[_POSITION].shape[0] if is_gpt2 else None
    return ModelSizes(
        family="gpt2" if is_gpt2 else "llama",
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(tensors[first("attention.key")], hidden, heads),
        inner=tensors[first("mlp.up")].shape[0],
        vocab=vocab,
        context=int(_one("context", context, saved, default)),
        tied="model.head.output.weight" not in tensors,
        rope_base=float(_one("rope_base", rope_base, saved, ModelSizes.rope_base)),
    )


def _one(name: str, given: Number | None, saved: Mapping[str, Any], default: Number | None) -> Number:
    known: Number | None = saved.get(name)
    if given is not None and known is not None and known != given:
        raise CheckpointError(f"the checkpoint says that {name} is {known} and not {given}: leave it out.")
    found = next((value for value in (given, known, default) if value is not None), None)
    if found is None:
        raise CheckpointError(
            f"neither state nor shapes in the checkpoint say what {name} of the model is: give {name}."
        )
    return found


def _kv_heads(key: TensorEntry, hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads or key.shape[0] % (hidden // heads):
        raise CheckpointError(
            f"a model of {hidden} features, whose keys have {key.shape[0]}, cannot have {heads} heads: give "
            "heads as the model was built with."
        )
    return key.shape[0] // (hidden // heads)
