"""The `model` section where it names a folder: completed with the sizes that the folder gives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, ModelError
from plait.train.paths import unusable

OWN = ("gpt2", "llama")
"""The models that plait has itself; any other name is a folder."""


def complete(given: Any) -> dict[str, Any]:
    """The fields of `model`, of which `name` is a folder, with the sizes in it.

    Raises ConfigError where there is no such model, or a field says something else than the folder.
    """
    name = given["name"]
    reason = unusable(name)
    if reason is not None:
        raise ConfigError(f"model.name is {name[:60]!r}…, {reason}: give another path.")
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name = {name!r} is neither {' nor '.join(OWN)} nor a folder with a config.json: "
            "give one of these."
        )
    # Late: it imports torch and transformers, which other configurations need not wait for.
    from plait.models.huggingface.folder import sizes_in

    try:
        sizes = asdict(sizes_in(folder))
    except ModelError as error:
        raise ConfigError(f"model.name = {name!r}: {error}") from None
    for field, value in given.items():
        if field == "context" and isinstance(value, int) and 1 <= value <= sizes["context"]:
            sizes["context"] = value
        elif field == "context":
            raise ConfigError(
                f"model.context = {value} does not fit the model in {name}, which takes 1 to "
                f"{sizes['context']} tokens: give a number in between, or leave it out."
            )
        elif field != "name" and value is not None and value != sizes.get(field):
            told = f", where it is {sizes[field]}" if field in sizes else ""
            raise ConfigError(
                f"model.{field} = {value} stands beside the folder {name}, whose config.json gives all "
                f"sizes{told}: leave it out."
            )
    return {**given, **sizes}
