"""Completes a `model` section that names a folder with the sizes in its config.json; checks paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, ModelError, hub_remedy

OWN_MODELS = ("gpt2", "llama")
"""Names of plait's own models; any other `model.name` is a folder."""
USUAL_CONTEXT = 1024
"""The context of a folder's model where neither the configuration nor the data give one, at most its own."""
_MOST_BYTES, _MOST_BYTES_A_NAME = 4095, 255


def with_folder_sizes(given: Any) -> dict[str, Any]:
    """Return the fields of a `model` section that names a folder, completed with the sizes in the folder.

    Raises `ConfigError` where there is no such model, or a field contradicts the folder.
    """
    name = given["name"]
    reason = invalid_path(name)
    if reason is not None:
        raise ConfigError(f"model.name is {name[:60]!r}…, {reason}: give another path.")
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name = {name!r} is neither {' nor '.join(OWN_MODELS)} nor a folder with a config.json: "
            f"give one of these{hub_remedy(name)}."
        )
    # Late: it imports torch and transformers, which other configurations need not wait for.
    from plait.models.huggingface.pretrained import sizes_in

    try:
        sizes = sizes_in(folder)
    except ModelError as error:
        raise ConfigError(f"model.name = {name!r}: {error}") from None
    if "context" not in given:
        sizes["context"] = min(sizes["context"], USUAL_CONTEXT)
    for field, value in given.items():
        if field == "context" and isinstance(value, int) and 1 <= value <= sizes["context"]:
            sizes["context"] = value
        elif field == "context":
            raise ConfigError(
                f"model.context = {value} does not fit the model in {name}, which takes 1 to "
                f"{sizes['context']} tokens: give a number in between, or leave it out."
            )
        elif field not in ("name", "lora") and value is not None and value != sizes.get(field):
            actual = f", where it is {sizes[field]}" if field in sizes else ""
            raise ConfigError(
                f"model.{field} = {value} is given with the folder {name}, whose config.json has all "
                f"sizes{actual}: leave it out."
            )
    return {**given, **sizes}


def invalid_path(text: str) -> str | None:
    """Return the reason why `text` is not a valid path, as a clause "which …", or None."""
    if "\0" in text:
        return "which has a zero byte in it"
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        return "which begins with the home of an unknown user"
    if len(os.fsencode(path)) > _MOST_BYTES or any(
        len(os.fsencode(part)) > _MOST_BYTES_A_NAME for part in path.parts
    ):
        return f"which is longer than file systems take ({_MOST_BYTES_A_NAME} bytes a name)"
    return None
