"""Other names for the parameters of a checkpoint: those of transformers, from and to plait's.

A table gives for plait's name that of transformers. `#` stands for the number of a block in both, where a
table is of all models of a family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from plait.checkpoint.huggingface.tensor_names import LLAMA
from plait.checkpoint.manifest import Manifest
from plait.checkpoint.rank_contents import parameter_key, state_key, state_keys
from plait.errors import CheckpointError, listed

LLAMA_NAMES: Mapping[str, str] = {row.ours[0]: row.theirs for row in LLAMA}
"""Of plait's own `llama`, whose tensors are those of `LlamaForCausalLM` one by one."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_TOLD = 5


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """Return the table from names of transformers to plait's."""
    return {theirs: ours for ours, theirs in table.items()}


def renamed(names: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Return for each name the one in `table`. CheckpointError for names that are not in it."""
    found = {name: _in_table(name, table) for name in names}
    unknown = [name for name, other in found.items() if other is None]
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {listed(unknown, most=_MOST_TOLD)}, which the model of --model has not: "
            "give the model that was saved, or leave --model out to keep all names."
        )
    return {name: other for name, other in found.items() if other is not None}


def renamed_optimizer(optimizer: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a manifest says of an optimizer, with other names of parameters."""
    if optimizer is None:
        return None
    by_name = {part: {names[name]: one for name, one in optimizer[part].items()} for part in _BY_NAME}
    return {**optimizer, **by_name}


_BY_NAME = ("group_of", "plain")


def renamed_manifest(manifest: Manifest, table: Mapping[str, str]) -> tuple[Manifest, dict[str, str]]:
    """Return a manifest with the names of `table`, and by each new name of a tensor the one that it had.

    Its files stay as they are: their boxes have the old names.
    """
    prefix = parameter_key("")
    own = [name.removeprefix(prefix) for name in manifest.tensors if name.startswith(prefix)]
    names = renamed({*own, *manifest.aliases}, table)
    before = {parameter_key(names[name]): parameter_key(name) for name in own}
    for name, keys in state_keys(manifest.tensors).items():
        before |= {state_key(names[name], key): state_key(name, key) for key in keys}
    return replace(
        manifest,
        tensors={new: manifest.tensors[old] for new, old in before.items()},
        optimizer=renamed_optimizer(manifest.optimizer, names),
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
