"""`files_of_tensors`: maps a model's tensors to the weight files in a Hugging Face folder.

The order of precedence is that of transformers:

    1. the file or index that config.json names under `transformers_weights`
    2. model.safetensors
    3. model.safetensors.index.json, and the shards that it names
    4. pytorch_model*.bin, which plait does not read

If none of these exists, all other *.safetensors are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.errors import ModelError, listed
from plait.files import is_plain_name, read_json, require_file

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".inv_freq")
"""Suffixes of tensors in older files that are no parameters: masks and rotary frequencies."""
SIZE_KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
"""The keys of sizes in config.json, by their names in plait's; GPT-2's have these as attributes only."""
_INDEX_ENDS = ".safetensors.index.json"
_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")
_MOST_LISTED = 5


def files_of_tensors(folder: Path) -> dict[str, str]:
    """Return the name of the file in `folder` that holds each tensor, by tensor name; empty without weights.

    Reads headers only. Needs the package safetensors. ModelError for a missing or damaged file, a tensor in
    two files, an index that does not fit its files, and weights in another format.
    """
    index = _index_of(folder)
    places = {} if index is None else _weight_map(folder, index)
    names = sorted(set(places.values())) if index is not None else _files_without_index(folder)
    found: dict[str, str] = {}
    for name in names:
        for key in _keys(folder, name, index):
            if key in found:
                raise ModelError(
                    f"{key} is in both {found[key]} and {name} of {folder}: remove the file that is old."
                )
            found[key] = name
    wrong = [f"{key} (in {name})" for key, name in places.items() if found.get(key) != name]
    if wrong:
        raise ModelError(
            f"{folder / str(index)} names {listed(wrong, most=_MOST_LISTED)}, which is not there: copy the "
            "folder anew, as save_pretrained wrote it."
        )
    return found


def config_in(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json` in `folder`. Raises ModelError where it is missing or damaged."""
    return json_object(folder / CONFIG, "give a folder as save_pretrained of transformers leaves it")


def json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError, with `remedy`, where it is missing or damaged."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: {remedy}.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{path} cannot be read ({reason}): {remedy}.") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no JSON object: {remedy}.")
    return found


def _index_of(folder: Path) -> str | None:
    """Return the name of the index file that transformers would use; None if it would use none."""
    named = _named_in_config(folder)
    if named is not None:
        return named if named.endswith(_INDEX_ENDS) else None
    return INDEX if not (folder / SINGLE).is_file() and (folder / INDEX).is_file() else None


def _files_without_index(folder: Path) -> list[str]:
    named = _named_in_config(folder)
    if named is not None:
        return [named]
    if (folder / SINGLE).is_file():
        return [SINGLE]
    others = sorted(folder.glob("pytorch_model*.bin"))
    if others:
        raise ModelError(
            f"the weights in {others[0]} are no safetensors: load the model with transformers and save it "
            "again with save_pretrained, or take the file away."
        )
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    _require_all_shards(folder, found)
    return found


def _named_in_config(folder: Path) -> str | None:
    """Return `transformers_weights` of config.json, or None. ModelError for a path outside the folder."""
    try:
        named = config_in(folder).get("transformers_weights")
    except ModelError:
        return None  # reading the configuration itself raises the error
    if named is None:
        return None
    if not is_plain_name(named) or not named.endswith((".safetensors", _INDEX_ENDS)):
        raise ModelError(
            f"{folder / CONFIG} has transformers_weights = {named!r}: give the name of a safetensors "
            "file in the folder, or of its index."
        )
    return str(named)


def _weight_map(folder: Path, index: str) -> Mapping[str, str]:
    """Return the file of each tensor according to an index. Raises ModelError where the index is damaged."""
    path = folder / index
    places = json_object(path, "copy the folder anew").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{path} has no weight_map with names of tensors and files: copy the folder anew.")
    for key, name in places.items():
        if not is_plain_name(name):
            raise ModelError(f"{path} names {name!r} for {key}, outside of its folder: copy the folder anew.")
    return places


def _require_all_shards(folder: Path, names: Sequence[str]) -> None:
    """Raise ModelError where files are numbered as shards and one of them is missing."""
    present = set(names)
    for matched in filter(None, map(_SHARD.fullmatch, names)):
        stem, count = matched[1], int(matched[3])
        for number in range(1, count + 1):
            name = f"{stem}{number:05d}-of-{count:05d}.safetensors"
            if name not in present:
                raise ModelError(f"{folder / name} is missing, one of {count} shards: copy the folder anew.")


def _keys(folder: Path, name: str, index: str | None) -> list[str]:
    """Return the names of the tensors in a file."""
    from safetensors import SafetensorError, safe_open

    path = folder / name
    try:
        require_file(path)
        with safe_open(path, framework="np") as opened:
            return list(opened.keys())
    except FileNotFoundError:
        named = f", though {index} names it" if index else ""
        raise ModelError(f"{path} is missing{named}: copy the folder anew.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): copy the file anew.") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged ({error}): copy the file anew.") from None
