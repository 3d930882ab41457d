"""Renames the parameters of a checkpoint, between plait's names and those of transformers.

A table maps plait's names to those of transformers. In a table for all models of a family, `#` is the
number of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from plait.checkpoint.huggingface.tensor_names import LLAMA
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.merged_tensors import adapted_linears
from plait.checkpoint.rank_contents import parameter_key, state_key, state_keys
from plait.errors import CheckpointError, listed

LLAMA_NAMES: Mapping[str, str] = {row.ours[0]: row.theirs for row in LLAMA}
"""For plait's `llama`, which has the same tensors as `LlamaForCausalLM`."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_LISTED = 5


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """Return the inverse table: plait's names by names of transformers."""
    return {theirs: ours for ours, theirs in table.items()}


def renamed(names: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Return a dict from each of `names` to its name in `table`. Raises CheckpointError for unknown names."""
    found = {name: _in_table(name, table) for name in names}
    unknown = [name for name, other in found.items() if other is None]
    if unknown and (adapted := adapted_linears(found)):
        raise CheckpointError(
            f"the checkpoint has adapters ({listed(adapted, most=_MOST_LISTED)}), for which transformers has "
            "no names: leave --model out to keep all names, or give --format huggingface, which merges them."
        )
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {listed(unknown, most=_MOST_LISTED)}, which the model of --model has not: "
            "give the model that was saved, or leave --model out to keep all names."
        )
    return {name: other for name, other in found.items() if other is not None}


def renamed_manifest(manifest: Manifest, table: Mapping[str, str]) -> tuple[Manifest, dict[str, str]]:
    """Return the manifest with parameters renamed by `table`, and each tensor's old key by its new key.

    Its files are unchanged: their boxes have the old keys.
    """
    prefix = parameter_key("")
    own = [name.removeprefix(prefix) for name in manifest.tensors if name.startswith(prefix)]
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
