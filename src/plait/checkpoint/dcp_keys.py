"""Finds the model, and the optimizer's state and groups, among the keys of a DCP checkpoint.

model.NAME                        or NAME, in a checkpoint of a model alone
optim.state.NAME.KEY              or `optimizer` for `optim`
optim.param_groups.0.OPTION       or .NAME.OPTION, as `flatten_optimizer_state_dict` writes

All may be nested in further dictionaries, as in torch's recipe, `{"app": {"model": …, "optim": …}}`. The
model is found by the names of the optimizer's state; without an optimizer, by the key `model`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.checkpoint.dcp_reader import DcpReader
from plait.checkpoint.rank_contents import parameter_key, state_key
from plait.errors import CheckpointError, listed

_OPTIMIZERS = ("optim", "optimizer")
_PARTS = ("state", "param_groups")
_FLAT = re.compile(r"((?:.+?\.)??(?:optim|optimizer))\.(state|param_groups)\.(.+)")
_MOST_LISTED = 5


@dataclass
class DcpKeys:
    """The keys of a DCP checkpoint, grouped into model tensors, optimizer state, group options and others."""

    model: dict[str, str] = field(default_factory=dict)
    """By key: the name of the parameter or buffer."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By key: the name of the parameter, and the key of its state."""
    options: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By key: the group (its number, or a parameter's name), and the option."""
    left_out: list[str] = field(default_factory=list)
    """The outermost keys of entries that a native checkpoint does not have."""

    def tensors(self, source: DcpReader) -> dict[str, str]:
        """Return the plait key of each tensor of model and optimizer, by its key in the DCP checkpoint."""
        states = {key: state_key(*pair) for key, pair in self.states.items() if key in source.tensors}
        return {key: parameter_key(name) for key, name in self.model.items()} | states


def parse_keys(source: DcpReader) -> DcpKeys:
    """Return the keys of the DCP checkpoint `source`, as model, optimizer state, options and others.

    Raises CheckpointError without a model, for several optimizers, and for state of unknown parameters.
    """
    found, others, roots = DcpKeys(), list[str](), dict[str, None]()
    for key in source.keys:
        entry = _optimizer_key(key, source.paths.get(key, ()))
        if entry is None:
            others.append(key)
            continue
        root, part, pair = entry
        roots[root] = None
        (found.states if part == "state" else found.options)[key] = pair
    if len(roots) > 1:
        raise CheckpointError(
            f"the checkpoint {source.folder} has several optimizers (under {listed(list(roots))}): write "
            "each with its model into a checkpoint of its own."
        )
    tensors = [key for key in others if key in source.tensors]
    prefix = _model_prefix(source, tensors, found)
    chosen = [key for key in tensors if key.startswith(prefix)]
    if not prefix and any(len(source.paths.get(key, ())) < 2 for key in chosen):
        # A flat model next to other dictionaries.
        chosen = [key for key in chosen if len(source.paths.get(key, ())) < 2]
    found.model = {key: key.removeprefix(prefix) for key in chosen}
    if not found.model:
        raise CheckpointError(
            f"the checkpoint {source.folder} has no tensors of a model: give one of a model's state_dict()."
        )
    kept = [*found.model, *found.states, *found.options]
    found.left_out = _outermost([key for key in others if key not in found.model], kept, source)
    _require_known((name for name, _ in found.states.values()), found, source)
    for name, key in found.states.values():
        if "." in key:
            raise CheckpointError(
                f"the checkpoint {source.folder} has the optimizer's state of {name} under {key!r}: only "
                "values under one key without a dot can be taken over, no dictionaries or lists."
            )
    return found


def optimizer_of(source: DcpReader, found: DcpKeys, kind: str) -> dict[str, Any] | None:
    """Return the optimizer entry of a plait manifest, with class name `kind`; None if no optimizer was saved.

    Options that JSON cannot hold are left out. Groups without names of parameters are left out too: then the
    loading optimizer keeps its options. Raises CheckpointError for state that JSON cannot hold.
    """
    if not (found.states or found.options):
        return None
    plain: dict[str, dict[str, Any]] = {}
    for key, (name, part) in found.states.items():
        if key not in source.tensors:
            value = source.value(key)
            if not _is_plain(value):
                raise CheckpointError(
                    f"the checkpoint {source.folder} has the optimizer's {part} of {name} = {value!r}, "
                    "which JSON cannot hold: write it without."
                )
            plain.setdefault(name, {})[part] = value
    groups, group_of = _groups(_options(source, found))
    _require_known(group_of, found, source)
    return {"class": kind, "groups": groups, "group_of": group_of, "plain": plain}


def _optimizer_key(key: str, path: tuple[str | int, ...]) -> tuple[str, str, tuple[str, str]] | None:
    """Return root, part and (parameter, entry) or (group, option) of an optimizer's key; None for others."""
    for depth, level in enumerate(path[:-1]):
        part, _, rest = str(path[depth + 1]).partition(".")
        if level in _OPTIMIZERS and part in _PARTS:
            root = ".".join(map(str, path[: depth + 1]))
            if len(path) > depth + 3 and not rest:
                return root, part, (str(path[depth + 2]), ".".join(map(str, path[depth + 3 :])))
            return root, part, _split_last(".".join([*filter(None, [rest]), *map(str, path[depth + 2 :])]))
    matched = _FLAT.fullmatch(key) if len(path) < 2 else None
    return None if matched is None else (matched[1], matched[2], _split_last(matched[3]))


def _split_last(text: str) -> tuple[str, str]:
    name, _, key = text.rpartition(".")
    return name, key


def _model_prefix(source: DcpReader, tensors: Sequence[str], found: DcpKeys) -> str:
    """Return the prefix of the model's keys, with the final dot. Raises CheckpointError if ambiguous."""
    keys, names = set(tensors), {name for name, _ in found.states.values()}
    if names:
        some = next(iter(names))
        ends = (key.removesuffix(some) for key in tensors if key.endswith(some))
        fitting = {end for end in ends if not end or end.endswith(".")}
        fitting = {end for end in fitting if all(f"{end}{name}" in keys for name in names)}
    else:
        paths = [path for key in tensors if "model" in (path := source.paths.get(key, ()))[:-1]]
        fitting = {".".join(map(str, path[: path.index("model") + 1])) + "." for path in paths}
    called = {prefix for prefix in fitting if f".{prefix}".endswith(".model.")}
    fitting = called if len(called) == 1 else fitting
    shortest = min(fitting, key=len, default="")
    if all(prefix.startswith(shortest) for prefix in fitting):  # the others are modules of that model
        fitting = fitting & {shortest}
    if len(fitting) > 1:
        raise CheckpointError(
            f"the checkpoint {source.folder} has several models (under "
            f"{listed([prefix.rstrip('.') or 'no key' for prefix in sorted(fitting)])}): write the one that "
            "is meant under the key model."
        )
    return fitting.pop() if fitting else _common_prefix(source, tensors, found)


def _common_prefix(source: DcpReader, tensors: Sequence[str], found: DcpKeys) -> str:
    """Return the prefix that all tensor keys share, or "", for a checkpoint without a dictionary `model`."""
    paths = [source.paths.get(key, ()) for key in tensors]
    roots = {path[0] if len(path) > 1 else None for path in paths}
    if len(roots) == 1 and None not in roots:
        return f"{roots.pop()}."
    if None in roots and len(roots) > 1:
        outer = listed(sorted(str(root) for root in roots if root is not None))
        raise CheckpointError(
            f"the checkpoint {source.folder} has tensors both outside and inside of the dictionaries "
            f"{outer}, none of which is called model: write the model under that key."
        )
    flat = not source.paths or found.states or found.options  # otherwise `model` may be a module
    if flat and tensors and all(key.startswith("model.") for key in tensors):
        return "model."
    return ""


def _outermost(keys: Iterable[str], kept: Iterable[str], source: DcpReader) -> list[str]:
    """Return for each key the outermost dictionary that holds it and no key of `kept`, or the key itself."""

    def prefixes(key: str) -> list[str]:
        path = source.paths.get(key, ()) or (key,)
        return [".".join(map(str, path[:count])) for count in range(1, len(path) + 1)]

    used = {prefix for key in kept for prefix in prefixes(key)}
    return list(dict.fromkeys(next((one for one in prefixes(key) if one not in used), key) for key in keys))


def _options(source: DcpReader, found: DcpKeys) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter group, by the group's key, without those that JSON cannot hold."""
    options: dict[str, dict[str, Any]] = {}
    for key, (group, option) in found.options.items():
        kept = options.setdefault(group, {})
        try:
            value = source.value(key)
        except CheckpointError:
            if option == "params":
                raise  # without it the group's parameters are unknown
            found.left_out.append(key)  # an object of some class, which cannot be loaded safely
            continue
        value = value.item() if getattr(value, "numel", int)() == 1 else value
        if not _is_plain(value):
            found.left_out.append(key)
        elif option != "param_names":
            kept[option] = value
    return options


def _groups(options: Mapping[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return each parameter group's options, and, by parameter name, the index of the parameter's group."""
    if any("params" in kept for kept in options.values()):
        if not all("params" in kept and number.isdigit() for number, kept in options.items()):
            return [], {}
        numbered = sorted(options.items(), key=lambda pair: int(pair[0]))
        of_group = [list(map(str, kept["params"])) for _, kept in numbered]
        groups = [{key: value for key, value in kept.items() if key != "params"} for _, kept in numbered]
        return groups, {name: number for number, names in enumerate(of_group) for name in names}
    numbers: dict[str, int] = {}
    group_of = {
        name: numbers.setdefault(json.dumps(kept, sort_keys=True), len(numbers))
        for name, kept in options.items()
    }
    return [json.loads(text) for text in numbers], group_of


def _require_known(names: Iterable[str], found: DcpKeys, source: DcpReader) -> None:
    known = set(found.model.values())
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if unknown:
        raise CheckpointError(
            f"the checkpoint {source.folder} has an optimizer of {listed(unknown, most=_MOST_LISTED)}, and "
            "no model with these: write it with torch's get_state_dict, which uses names of parameters."
        )


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
