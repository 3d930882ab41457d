"""Names of tensors in plait's own models and in transformers, and checkpoints renamed between them.

GPT-2 of transformers stores its matrices transposed (`Conv1D`: `[in, out]`), with query, key and value in one
tensor. Llama differs in names only; rotary embedding pairs the same features.

A table maps plait's names to those of transformers. In a table for all models of a family, `#` is the
number of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from plait.checkpoint.full_tensors import adapted_weights
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.rank_contents import parameter_key, state_key, state_keys
from plait.errors import CheckpointError, listed
from plait.plan.decoder_sizes import Decoder


@dataclass(frozen=True)
class TensorPair:
    """A tensor of transformers, and the tensors of plait with the same values."""

    theirs: str
    ours: tuple[str, ...]
    """Names; the tensor of transformers is their concatenation along its last dim."""
    shape: tuple[int, ...]
    """Shape of each tensor of plait."""
    transposed: bool = False
    is_buffer: bool = False
    """Whether it is no parameter, so that it is written in the dtype in which it is saved."""

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of the tensor of transformers."""
        *others, last = reversed(self.shape) if self.transposed else self.shape
        return (*others, last * len(self.ours))

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor of transformers that is made of the tensors of plait, in the order of `ours`."""
        turned = [one.t() if self.transposed and one.dim() > 1 else one for one in tensors]
        return turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)


@dataclass(frozen=True)
class Template:
    """A `TensorPair` for any model size: `#` in names is a block's index, `shape` names sizes ("hidden")."""

    theirs: str
    ours: tuple[str, ...]
    shape: tuple[str, ...]
    transposed: bool = False


def _weight(theirs: str, ours: str, *shape: str) -> Template:
    return Template(f"{theirs}.weight", (f"{ours}.weight",), shape)


def _norm(theirs: str, ours: str) -> tuple[Template, Template]:
    return _weight(theirs, ours, "hidden"), Template(f"{theirs}.bias", (f"{ours}.bias",), ("hidden",))


def _conv1d(theirs: str, ours: Sequence[str], rows: str, columns: str) -> tuple[Template, Template]:
    weights, biases = (tuple(f"{name}.{kind}" for name in ours) for kind in ("weight", "bias"))
    return (
        Template(f"{theirs}.weight", weights, (rows, columns), transposed=True),
        Template(f"{theirs}.bias", biases, (rows,)),
    )


_QUERY_KEY_VALUE = tuple(f"blocks.#.attention.{name}" for name in ("query", "key", "value"))
GPT2 = (
    _weight("transformer.wte", "embedding.token", "vocab", "hidden"),
    _weight("transformer.wpe", "embedding.position", "context", "hidden"),
    *_norm("transformer.h.#.ln_1", "blocks.#.attention.norm"),
    *_conv1d("transformer.h.#.attn.c_attn", _QUERY_KEY_VALUE, "hidden", "hidden"),
    *_conv1d("transformer.h.#.attn.c_proj", ["blocks.#.attention.output"], "hidden", "hidden"),
    *_norm("transformer.h.#.ln_2", "blocks.#.mlp.norm"),
    *_conv1d("transformer.h.#.mlp.c_fc", ["blocks.#.mlp.up"], "inner", "hidden"),
    *_conv1d("transformer.h.#.mlp.c_proj", ["blocks.#.mlp.down"], "hidden", "inner"),
    *_norm("transformer.ln_f", "head.norm"),
    _weight("lm_head", "head.output", "vocab", "hidden"),
)
LLAMA = (
    _weight("model.embed_tokens", "embedding.token", "vocab", "hidden"),
    _weight("model.layers.#.input_layernorm", "blocks.#.attention.norm", "hidden"),
    _weight("model.layers.#.self_attn.q_proj", "blocks.#.attention.query", "hidden", "hidden"),
    _weight("model.layers.#.self_attn.k_proj", "blocks.#.attention.key", "keys", "hidden"),
    _weight("model.layers.#.self_attn.v_proj", "blocks.#.attention.value", "keys", "hidden"),
    _weight("model.layers.#.self_attn.o_proj", "blocks.#.attention.output", "hidden", "hidden"),
    _weight("model.layers.#.post_attention_layernorm", "blocks.#.mlp.norm", "hidden"),
    _weight("model.layers.#.mlp.gate_proj", "blocks.#.mlp.gate", "inner", "hidden"),
    _weight("model.layers.#.mlp.up_proj", "blocks.#.mlp.up", "inner", "hidden"),
    _weight("model.layers.#.mlp.down_proj", "blocks.#.mlp.down", "hidden", "inner"),
    _weight("model.norm", "head.norm", "hidden"),
    _weight("lm_head", "head.output", "vocab", "hidden"),
)
HEAD = "lm_head.weight"
"""The weight that is not stored where it is tied to the embedding."""


def tensor_pairs(sizes: Decoder) -> list[TensorPair]:
    """Return, for each tensor of the transformers model, its name there and its names in plait."""
    templates = [
        one for one in (GPT2 if sizes.family == "gpt2" else LLAMA) if not (sizes.tied and one.theirs == HEAD)
    ]
    found: list[TensorPair] = []
    for in_block, group in groupby(templates, lambda one: "#" in one.theirs):
        each = list(group)
        for block in range(sizes.layers if in_block else 1):
            found += [_pair(one, sizes, str(block)) for one in each]
    return found


def _pair(template: Template, sizes: Decoder, block: str) -> TensorPair:
    numbers = {
        "vocab": sizes.vocab,
        "hidden": sizes.hidden,
        "context": sizes.context,
        "inner": sizes.inside,
        "keys": sizes.key_heads * sizes.head_size,
    }
    ours = tuple(name.replace("#", block) for name in template.ours)
    shape = tuple(numbers[name] for name in template.shape)
    return TensorPair(template.theirs.replace("#", block), ours, shape, template.transposed)


LLAMA_NAMES: Mapping[str, str] = {row.ours[0]: row.theirs for row in LLAMA}
"""For plait's `llama`, which has the same tensors as `LlamaForCausalLM`."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_LISTED = 5


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """Return the inverse of a table of tensor names: plait's names by the names of transformers."""
    return {theirs: ours for ours, theirs in table.items()}


def renamed(names: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Return a dict from each of `names` to its name in `table`. Raises CheckpointError for unknown names."""
    found = {name: _in_table(name, table) for name in names}
    unknown = [name for name, other in found.items() if other is None]
    if unknown and (adapted := adapted_weights(found)):
        paths = [name.removesuffix(".weight") for name in adapted]
        raise CheckpointError(
            f"the checkpoint has adapters ({listed(paths, most=_MOST_LISTED)}), for which transformers has "
            "no names: leave --model out to keep all names, or give --format huggingface, which merges them."
        )
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {listed(unknown, most=_MOST_LISTED)}, which the model of --model has not: "
            "give the model that was saved, or leave --model out to keep all names."
        )
    return {name: other for name, other in found.items() if other is not None}


def renamed_manifest(manifest: Manifest, table: Mapping[str, str]) -> tuple[Manifest, dict[str, str]]:
    """Return the manifest with parameters renamed (not in files), and a dict from new to old keys."""
    own = list(manifest.parameters)
    names = renamed([*own, *manifest.aliases, *manifest.aliases.values()], table)
    before = {parameter_key(names[name]): parameter_key(name) for name in own}
    for name, keys in state_keys(manifest.tensors).items():
        before |= {state_key(names[name], key): state_key(name, key) for key in keys}
    optimizer = manifest.optimizer and {
        **manifest.optimizer,
        **{
            part: {names[name]: one for name, one in manifest.optimizer[part].items()}
            for part in ("group_of", "plain")
        },
    }
    return replace(
        manifest,
        tensors={new: manifest.tensors[old] for new, old in before.items()},
        optimizer=optimizer,
        aliases={names[alias]: names[name] for alias, name in manifest.aliases.items()},
    ), before


def _in_table(name: str, table: Mapping[str, str]) -> str | None:
    if name in table:
        return table[name]
    number = _NUMBER.search(name)
    if number is None:
        return None
    other = table.get(f"{name[: number.start()]}#{name[number.end() :]}")
    return None if other is None else other.replace("#", number[0])
