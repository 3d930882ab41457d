"""What the keys of a checkpoint of torch's mean: tensors of the model, and an optimizer's state and groups.

model.NAME                        or NAME, where the model stands alone
optim.state.NAME.KEY              `optim` may be `optimizer` too
optim.param_groups.0.OPTION       or .NAME.OPTION, as `flatten_optimizer_state_dict` has it
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.checkpoint.contents import optimizer_state, parameter
from plait.checkpoint.dcp_source import Source
from plait.errors import CheckpointError, listed

_OPTIMIZER = re.compile(r"optim(?:izer)?\.(state|param_groups)\.(.+)")
_MOST_TOLD = 5


@dataclass
class Meaning:
    """Keys of a checkpoint of torch's, by what stands there."""

    model: dict[str, str] = field(default_factory=dict)
    """Key, and the name of the parameter or buffer."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key, the name of the parameter, and the key of its state."""
    options: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key, the group (its number, or a parameter's name), and the option."""

    def tensors(self, source: Source) -> dict[str, str]:
        """For the key of every tensor that is to be kept, its name in a native checkpoint."""
        states = {key: optimizer_state(*pair) for key, pair in self.states.items() if key in source.tensors}
        return {key: parameter(name) for key, name in self.model.items()} | states


def meaning(source: Source) -> Meaning:
    """CheckpointError where there is no model, or an optimizer that does not name its parameters."""
    found, others = Meaning(), list[str]()
    for key in source.keys:
        matched = _OPTIMIZER.fullmatch(key)
        if matched is None:
            others.append(key)
            continue
        pair = _last_apart(matched[2], source.paths.get(key, ()))
        if matched[1] == "state":
            found.states[key] = pair
        else:
            found.options[key] = pair
    tensors = [key for key in others if key in source.tensors]
    if _has_prefix(source, tensors, found):
        found.model = {key: key.removeprefix("model.") for key in tensors if key.startswith("model.")}
    else:
        found.model = {key: key for key in tensors}
    if not found.model:
        raise CheckpointError(
            f"the checkpoint {source.folder} has no tensors of a model: give one of a model's state_dict()."
        )
    _require_known((name for name, _ in found.states.values()), found, source)
    for name, key in found.states.values():
        if "." in key:
            raise CheckpointError(
                f"the checkpoint {source.folder} has the optimizer's state of {name} under {key!r}: only "
                "what stands under one key without a dot can be taken over, no dictionaries or lists."
            )
    return found


def optimizer_of(source: Source, found: Meaning, kind: str) -> dict[str, Any] | None:
    """What a manifest says of the optimizer; None where there is none.

    What a group has that is not plain is left out. Without names in its groups there are no groups: then the
    options of the optimizer that loads it stay. CheckpointError for a state that is not plain.
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


def _has_prefix(source: Source, tensors: Iterable[str], found: Meaning) -> bool:
    """Whether names of the model stand behind `model.`, which may also be how a module is called."""
    for key in tensors:
        path = source.paths.get(key, ())
        if len(path) > 1 and path[0] == "model":
            return True
    told = bool(source.paths) and not (found.states or found.options)
    return not told and all(key.startswith("model.") for key in tensors)


def _last_apart(rest: str, path: tuple[str | int, ...]) -> tuple[str, str]:
    """`NAME.KEY` in two; as it was nested, where that is known."""
    if len(path) > 3:
        return str(path[2]), ".".join(map(str, path[3:]))
    name, _, key = rest.rpartition(".")
    return name, key


def _options(source: Source, found: Meaning) -> dict[str, dict[str, Any]]:
    """What can be told of the options, by group."""
    options: dict[str, dict[str, Any]] = {}
    for key, (group, option) in found.options.items():
        kept = options.setdefault(group, {})
        try:
            value = source.value(key)
        except CheckpointError:
            continue  # an object of some class: options that matter are numbers
        value = value.item() if getattr(value, "numel", int)() == 1 else value
        if option != "param_names" and _is_plain(value):
            kept[option] = value
    return options


def _groups(options: Mapping[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The options of each group, and the group of each parameter."""
    if any("params" in kept for kept in options.values()):
        if not all("params" in kept and number.isdigit() for number, kept in options.items()):
            return [], {}
        numbered = sorted(options.items(), key=lambda pair: int(pair[0]))
        of_group = [list(map(str, kept["params"])) for _, kept in numbered]
        groups = [{key: value for key, value in kept.items() if key != "params"} for _, kept in numbered]
        return groups, {name: number for number, names in enumerate(of_group) for name in names}
    alike: dict[str, int] = {}
    group_of = {
        name: alike.setdefault(json.dumps(kept, sort_keys=True), len(alike)) for name, kept in options.items()
    }
    return [json.loads(text) for text in alike], group_of


def _require_known(names: Iterable[str], found: Meaning, source: Source) -> None:
    known = set(found.model.values())
    strange = [name for name in dict.fromkeys(names) if name not in known]
    if strange:
        raise CheckpointError(
            f"the checkpoint {source.folder} has an optimizer of {listed(strange, most=_MOST_TOLD)}, "
            "and no model with these: write it with torch's get_state_dict, which names what it is of."
        )


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
