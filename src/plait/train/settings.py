"""Settings: from a TOML file and `--section.field value` options to a checked `Config`.

Each value keeps its origin, so an error can say where it was written.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from plait.errors import ConfigError
from plait.train.config import Config

Schema = Mapping[str, Any]

_NOUNS = {
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", ""),
    "string": ("text", "texts"),
    "null": ("none", ""),
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_WORDS = {"true": True, "false": False, "none": None}
_SHOWN = 60  # characters of a bad value that a message repeats


@dataclass(frozen=True)
class Setting:
    """A value that somebody wrote, and where: a file's name, or "the command line"."""

    value: object
    origin: str


@cache
def sections() -> Mapping[str, Schema]:
    """Return the JSON schema of each section, by name: its `description` and `properties`."""
    schema = Config.model_json_schema()
    return MappingProxyType(
        {name: schema["$defs"][_reference(s)] for name, s in schema["properties"].items()}
    )


@cache
def fields() -> Mapping[str, Schema]:
    """Return the JSON schema of each field, by its full name, `section.field`."""
    return MappingProxyType(
        {
            f"{section}.{name}": field
            for section, schema in sections().items()
            for name, field in schema["properties"].items()
        }
    )


def _reference(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def takes(field: Schema) -> str:
    """Say what a field accepts: "a whole number of at least 1 or none"."""
    if "anyOf" in field:
        return " or ".join(takes(option) for option in field["anyOf"])
    options = field.get("enum") or ([field["const"]] if "const" in field else [])
    if options:
        return ("one of " if len(options) > 1 else "") + ", ".join(options)
    if field["type"] == "array":
        item = field.get("items") or field["prefixItems"][0]
        number = f"{field['minItems']} " if "minItems" in field else ""
        return f"a list [...] of {number}{_NOUNS[item['type']][1]}{_bounds(item)}"
    prefix = "a path" if field.get("format") == "path" else _NOUNS[field["type"]][0]
    return prefix + _bounds(field) + (", not empty" if field.get("minLength") else "")


def _bounds(field: Schema) -> str:
    words = " and ".join(f"{word} {field[key]}" for key, word in _BOUNDS.items() if key in field)
    return f" of {words}" if words.startswith("at") else f" {words}" if words else ""


def load_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """Return the configuration in the TOML file `path`, if any, with `overrides` (as in `sys.argv`) on top.

    Raises `ConfigError`, as one sentence, for whatever cannot be read, is unknown or has a bad value.
    """
    return _load(path, _options(overrides))


def config_from_arguments(
    arguments: Sequence[str], usual: Mapping[str, object] | None = None, origin: str = ""
) -> Config:
    """Return the configuration that `arguments` ask for: overrides, and at most one `--config FILE`.

    `usual` holds, section by section, what stands in place of the defaults, and `origin` says where it does.
    """
    options = list(_options(arguments))
    paths = [Path(text) for name, text in options if name == "config"]
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times: give one configuration file.")
    rest = [option for option in options if option[0] != "config"]
    return _load(paths[0] if paths else None, rest, _settings(usual or {}, origin))


def _load(
    path: Path | None, options: Iterable[tuple[str, str]], usual: Mapping[str, Setting] | None = None
) -> Config:
    settings = dict(usual or {}) | ({} if path is None else _read_file(path))
    for name, text in options:
        field = _field(name, "the command line")
        settings[name] = Setting(_typed(text, field), "the command line")
    return _build(settings)


def _read_file(path: Path) -> dict[str, Setting]:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {path}: check --config.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give --config a TOML file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8: give --config a TOML file.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML, mend it there: {error}.") from None
    return _settings(tree, str(path))


def _settings(tree: Mapping[str, object], origin: str) -> dict[str, Setting]:
    settings = {}
    for name, value in _flatten(tree):
        is_none = _takes_none(_field(name, origin)) and value == "none"  # TOML itself has no word for it
        settings[name] = Setting(None if is_none else value, origin)
    return settings


def _flatten(tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for section, body in tree.items():
        if not isinstance(body, dict):
            yield section, body
        elif body:
            yield from ((f"{section}.{name}", value) for name, value in body.items())
        elif section not in sections():
            yield section, body


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each `--name value` or `--name=value`."""
    rest = iter(arguments)
    for argument in rest:
        if not (argument.startswith("--") and argument[2:3].isalpha()):
            raise ConfigError(
                f'"{argument}" is not an option: write --section.field value, or --config FILE for a file.'
            )
        name, equals, text = argument[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                wanted = takes(fields()[name]) if name in fields() else "a value"
                raise ConfigError(f"--{name} has no value: give {wanted} after it.")
        yield name, text


def _typed(text: str, field: Schema) -> object:
    """Read `text` as the first kind of value that the field takes; what is none of them stays text."""
    if text.lower() == "none" and _takes_none(field):
        return None
    for option in field.get("anyOf", [field]):
        with suppress(ValueError, KeyError, RecursionError):
            return _read(text, option["type"])
    return text


def _takes_none(field: Schema) -> bool:
    return any(option.get("type") == "null" for option in field.get("anyOf", ()))


def _read(text: str, kind: str) -> object:
    if kind == "string":
        return text
    if kind == "integer":
        return int(text)
    if kind == "number":
        return float(text)
    if kind == "array":
        return json.loads(text)
    return _WORDS[text.lower()]


def _field(name: str, origin: str) -> Schema:
    """Return the field's schema, or raise with the nearest known names."""
    if name in fields():
        return fields()[name]
    if name in sections():
        example = next(known for known in fields() if known.startswith(f"{name}."))
        raise ConfigError(f"{name} (from {origin}) is a section: set one of its fields, such as {example}.")
    near = nearest(name)
    remedy = f"did you mean {near}?" if near else "see `plait train --help` for all fields."
    raise ConfigError(f"{name} (from {origin}) is not a known field: {remedy}")


def nearest(name: str) -> str | None:
    """Return the known field nearest to `name`, if one is near; its section may be wrong or missing."""
    lasts = {known.rpartition(".")[2]: known for known in fields()}
    near = get_close_matches(name.rpartition(".")[2], lasts, n=1)
    return lasts[near[0]] if near else None


def _require_json(name: str, setting: Setting) -> None:
    """ConfigError for what JSON cannot hold: numbers of thousands of digits, text that is no UTF-8."""
    try:
        json.dumps(setting.value, default=str, ensure_ascii=False).encode()
    except ValueError:
        raise ConfigError(
            f"{name} (from {setting.origin}) is no UTF-8 text, or a number that is too long: give "
            f"{takes(fields()[name])}."
        ) from None


def _build(settings: Mapping[str, Setting]) -> Config:
    tree: dict[str, dict[str, object]] = {}
    for name, setting in settings.items():
        section, _, field = name.partition(".")
        _require_json(name, setting)
        tree.setdefault(section, {})[field] = setting.value
    try:
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:2])
    setting = settings.get(name) or Setting(first["input"], f"the folder {settings['model.name'].value}")
    shown = json.dumps(setting.value, default=str, ensure_ascii=False)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    raise ConfigError(f"{name} is {shown} (from {setting.origin}): give {takes(fields()[name])}.")
