"""Parse a TOML file and `--section.field value` options into a `Config`.

Each value keeps its origin, so that an error can name the place where it was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from plait.app.config.config import Config
from plait.errors import ConfigError
from plait.files import read_toml

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
_ALIASES = {
    "train.optimizer": "train.optimizer.name",
    "train.schedule": "train.schedule.name",
    **{f"train.optimizer.{name}": f"train.{name}" for name in ("lr", "weight_decay", "betas", "eps")},
    **{f"train.schedule.{name}": f"train.{name}" for name in ("warmup", "min_lr")},
}
"""Other names of fields: what users of torch write into a table of the optimizer or the schedule."""
_IN_PLACE_OF = {
    "train.steps": "train.epochs",
    "train.epochs": "train.steps",
    "data.source": "data.mixture",
    "data.mixture": "data.source",
}
"""Fields of which one is given in place of the other."""
_ELSEWHERE = {"learning_rate": "train.lr", "optim": "train.optimizer", "max_steps": "train.steps"}
"""What other trainers call a field, where the names are unlike."""
_CONSTANTS = {"true": True, "false": False, "none": None}
_SHOWN = 60  # characters of a bad value in an error message


@dataclass(frozen=True)
class GivenValue:
    """A value of a configuration field, and its origin: a file name, or "the command line"."""

    value: object
    origin: str


@cache
def sections() -> Mapping[str, Schema]:
    """Return the JSON schema of each section by name, with its `description` and `properties`."""
    schema = Config.model_json_schema()
    return MappingProxyType(
        {name: _section(one, schema) for name, one in schema["properties"].items() if "$ref" in one}
    )


def _section(field: Schema, schema: Schema) -> Schema:
    """Return the schema of a section, to which `field` refers; sections in it are replaced by their own."""
    found: dict[str, Any] = schema["$defs"][str(field["$ref"]).rpartition("/")[2]]
    inner: dict[str, Any] = {}
    for name, one in found["properties"].items():
        inner[name] = _section(one, schema) if "$ref" in one else one
        if "$ref" in one.get("items", ()):
            inner[name] = {**one, "items": _section(one["items"], schema)}
    return {**found, "properties": inner}


@cache
def fields() -> Mapping[str, Schema]:
    """Return the JSON schema of each field by its full name, `section.field`."""
    return MappingProxyType(dict(_fields({"properties": sections()}, "")))


def _fields(schema: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
    """Yield the fields of a section, and those of sections in it, with `prefix` before their names."""
    for name, field in schema["properties"].items():
        if "properties" in field:
            yield from _fields(field, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", {**field, "description": " ".join(field["description"].split())}


def allowed_values_text(field: Schema) -> str:
    """Return a description of the values of a field, such as "a whole number of at least 1 or none"."""
    if "anyOf" in field:
        return " or ".join(allowed_values_text(option) for option in field["anyOf"])
    options = field.get("enum") or ([field["const"]] if "const" in field else [])
    if options:
        return ("one of " if len(options) > 1 else "") + ", ".join(options)
    if field["type"] == "array":
        item = field.get("items") or field["prefixItems"][0]
        if "properties" in item:
            return f"a list [...] of tables of {', '.join(item['properties'])}"
        number = f"{field['minItems']} " if "minItems" in field else ""
        return f"a list [...] of {number}{_NOUNS[item['type']][1]}{_bounds(item)}"
    if field["type"] == "object":
        return "a table of texts by name"
    prefix = "a path" if field.get("format") == "path" else _NOUNS[field["type"]][0]
    return prefix + _bounds(field) + (", not empty" if field.get("minLength") else "")


def _bounds(field: Schema) -> str:
    words = " and ".join(f"{word} {_number(field[key])}" for key, word in _BOUNDS.items() if key in field)
    return f" of {words}" if words.startswith("at") else f" {words}" if words else ""


def _number(bound: float) -> float:
    """Return a bound from pydantic's message as text, whole numbers without `.0`."""
    return int(bound) if bound == int(bound) else bound


def config_from_arguments(
    arguments: Sequence[str], defaults: Mapping[str, object] | None = None, origin: str = ""
) -> Config:
    """Return the configuration of `arguments` (as in `sys.argv`): options and at most one `--config FILE`.

    `defaults` replace those of the fields, section by section; `origin` names them in errors. Raises
    `ConfigError` for a file that cannot be read, an unknown field and a bad value.
    """
    return _build(_given_by(arguments, defaults, origin))


def given_values(arguments: Sequence[str]) -> dict[str, object]:
    """Return the fields that `arguments` set, by options or in the file that they name, with their values."""
    return {name: given.value for name, given in _given_by(arguments).items()}


def _given_by(
    arguments: Sequence[str], defaults: Mapping[str, object] | None = None, origin: str = ""
) -> dict[str, GivenValue]:
    """Return the values in `arguments` by the names of their fields; see `config_from_arguments`."""
    options = list(_options(arguments))
    paths = [Path(text) for name, text in options if name == "config"]
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times: give one configuration file.")
    given = _given_values(defaults or {}, origin) | (_read_file(paths[0]) if paths else {})
    for name, text in options:
        if name != "config":
            field = _field(name, "the command line")
            given[_ALIASES.get(name, name)] = GivenValue(_typed(text, field), "the command line")
    return _without_overridden(given)


def _without_overridden(given: dict[str, GivenValue]) -> dict[str, GivenValue]:
    """Return configuration values without those whose alternative option the command line sets."""
    overridden = [
        other
        for field, other in _IN_PLACE_OF.items()
        if field in given and other in given
        if given[field].origin == "the command line" != given[other].origin
    ]
    return {name: value for name, value in given.items() if name not in overridden}


def _read_file(path: Path) -> dict[str, GivenValue]:
    try:
        tree = read_toml(path)
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {path}: check --config.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give --config a TOML file.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML, mend it there: {error}.") from None
    return _given_values(tree, str(path))


def _given_values(tree: Mapping[str, object], origin: str) -> dict[str, GivenValue]:
    given = {}
    for name, value in _flatten(tree):
        is_none = _takes_none(_field(name, origin)) and value == "none"  # TOML has no null
        field = _ALIASES.get(name, name)
        if field in given:
            raise ConfigError(f"{field} is given twice in {origin}, also as {name}: leave one of them out.")
        given[field] = GivenValue(None if is_none else value, origin)
    return given


def _flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, body in tree.items():
        full = f"{prefix}{name}"
        if isinstance(body, dict) and body and (not prefix or _is_section(full)):
            yield from _flatten(body, f"{full}.")
        elif body != {} or not _is_section(full):
            yield full, body


def _is_section(name: str) -> bool:
    return any(known.startswith(f"{name}.") for known in fields())


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each `--name value` and `--name=value`."""
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
                wanted = allowed_values_text(fields()[name]) if name in fields() else "a value"
                raise ConfigError(f"--{name} has no value: give {wanted} after it.")
        yield name, text


def _typed(text: str, field: Schema) -> object:
    """Return `text` converted to the first of the field's types that can parse it, else unchanged."""
    if text.lower() == "none" and _takes_none(field):
        return None
    # A number in the place of a text is a text, so texts come last; a table begins with a brace.
    options = field.get("anyOf", [field])
    for option in sorted(options, key=lambda one: one["type"] == "string"):
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
        return _array(text)
    if kind == "object":
        return _table(text)
    return _CONSTANTS[text.lower()]


def _array(text: str) -> object:
    """Return the items of `[1, 2]` or `["a", "b"]` in JSON, or of `1,2` or `a,b`."""
    try:
        return json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError:
        if text.startswith("["):
            raise
        return [item.strip() for item in text.split(",")]


def _table(text: str) -> object:
    """Return the table that `text` is in JSON. Raises ValueError where it is none."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no table")
    return found


def _field(name: str, origin: str) -> Schema:
    """Return the JSON schema of a field. Raises `ConfigError`, with the nearest name, for an unknown one."""
    name = _ALIASES.get(name, name)
    if name in fields():
        return fields()[name]
    if _is_section(name):
        example = next(known for known in fields() if known.startswith(f"{name}."))
        raise ConfigError(f"{name} (from {origin}) is a section: set one of its fields, such as {example}.")
    near = nearest_field(name)
    remedy = f"did you mean {near}?" if near else "see `plait train --help` for all fields."
    raise ConfigError(f"{name} (from {origin}) is not a known field: {remedy}")


def nearest_field(name: str) -> str | None:
    """Return the field with the most similar name, in the section of `name` if there is one; else None."""
    section, _, last = name.rpartition(".")
    if last in _ELSEWHERE:
        return _ELSEWHERE[last]
    names = [*(one for one in _ALIASES if one not in fields()), *fields()]
    own = {known.rpartition(".")[2]: known for known in names if known.rpartition(".")[0] == section}
    for lasts in (own, {known.rpartition(".")[2]: known for known in names}):
        if near := get_close_matches(last, lasts, n=1):
            return lasts[near[0]]
    return None


def _require_json(name: str, given: GivenValue) -> None:
    """Raise `ConfigError` for a value that JSON cannot represent: thousands of digits, or invalid UTF-8."""
    try:
        json.dumps(given.value, default=str, ensure_ascii=False).encode()
    except ValueError:
        raise ConfigError(
            f"{name} (from {given.origin}) is no UTF-8 text, or a number that is too long: give "
            f"{allowed_values_text(fields()[name])}."
        ) from None


def _build(values: Mapping[str, GivenValue]) -> Config:
    tree: dict[str, Any] = {}
    for name, given in values.items():
        *around, field = name.split(".")
        _require_json(name, given)
        section = tree
        for part in around:
            section = section.setdefault(part, {})
        section[field] = given.value
    try:
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]
        name = next(found for n in range(len(parts), 0, -1) if (found := ".".join(parts[:n])) in fields())
    given = values.get(name) or GivenValue(first["input"], f"the folder {values['model.name'].value}")
    shown = json.dumps(given.value, default=str, ensure_ascii=False)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    raise ConfigError(f"{name} is {shown} (from {given.origin}): give {allowed_values_text(fields()[name])}.")
