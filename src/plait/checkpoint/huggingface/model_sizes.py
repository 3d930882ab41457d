"""The sizes of plait's own models, as far as a checkpoint tells them."""

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
Told = int | float


@dataclass(frozen=True)
class ModelSizes:
    """Of a `gpt2` or a `llama`, by the names of their arguments."""

    family: Literal["gpt2", "llama"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Of GPT-2 as many as heads."""
    inner: int
    """Of GPT-2 4 · hidden."""
    vocab: int
    context: int
    tied: bool
    rope_base: float = 10000.0
    """Of Llama."""


def sizes_from_manifest(
    manifest: Manifest,
    *,
    heads: int | None = None,
    context: int | None = None,
    rope_base: float | None = None,
) -> ModelSizes:
    """The sizes of the model in a checkpoint.

    Shapes tell most of them. The number of heads, and of a Llama the context and the base of its rotary
    embedding, are those that `plait train` or an import left in the checkpoint's state, or else those given.
    CheckpointError for another model, and where neither says them, or they contradict each other.
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
    told = _told(manifest.state)
    heads = int(_one("heads", heads, told, None))
    is_gpt2 = _POSITION in tensors
    usual = tensors[_POSITION].shape[0] if is_gpt2 else None
    return ModelSizes(
        family="gpt2" if is_gpt2 else "llama",
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(tensors[first("attention.key")], hidden, heads),
        inner=tensors[first("mlp.up")].shape[0],
        vocab=vocab,
        context=int(_one("context", context, told, usual)),
        tied="model.head.output.weight" not in tensors,
        rope_base=float(_one("rope_base", rope_base, told, ModelSizes.rope_base)),
    )


def _told(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `import_folder` or `plait train` left."""
    told = section(state, "sizes") or section(state, "config", "model")
    return {name: value for name, value in told.items() if isinstance(value, Told) and isfinite(value)}


def _one(name: str, given: Told | None, told: Mapping[str, Any], usual: Told | None) -> Told:
    said: Told | None = told.get(name)
    if given is not None and said is not None and said != given:
        raise CheckpointError(f"the checkpoint says that {name} is {said} and not {given}: leave it out.")
    found = next((value for value in (given, said, usual) if value is not None), None)
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
