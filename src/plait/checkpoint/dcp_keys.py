"""What the keys of a checkpoint of torch's mean: tensors of the model, and an optimizer's state and groups.

model.NAME                        or NAME, where the model stands alone
optim.state.NAME.KEY              `optim` may be `optimizer` too
optim.param_groups.0.OPTION       or .NAME.OPTION, as `flatten_optimizer_state_dict` has it

All of it may stand in further dictionaries, as in torch's own recipe, `{"app": {"model": …, "optim": …}}`.
Where the model is the names tell for which the optimizer has a state; else the word `model`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.checkpoint.dcp_reader import DcpReader
from plait.checkpoint.rank_contents import parameter_key, state_key
from plait.checkpoint.renaming import renamed
from plait.errors import CheckpointError, listed

_OPTIMIZERS = ("optim", "optimizer")
_PARTS = ("state", "param_groups")
_FLAT = re.compile(r"((?:.+?\.)??(?:optim|optimizer))\.(state|param_groups)\.(.+)")
_MOST_TOLD = 5


@dataclass
class DcpKeys:
    """Keys of a checkpoint of torch's, by what stands there."""

    model: dict[str, str] = field(default_factory=dict)
    """Key, and the name of the parameter or buffer."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key, the name of the parameter, and the key of its state."""
    options: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key, the group (its number, or a parameter's name), and the option."""
    left_out: list[str] = field(default_factory=list)
    """What has no place in a native checkpoint, by the outermost keys."""

    def tensors(self, source: DcpReader) -> dict[str, str]:
        """For the key of every tensor that is to be kept, its name in a native checkpoint."""
        states = {key: state_key(*pair) for key, pair in self.states.items() if key in source.tensors}
        return {key: parameter_key(name) for key, name in self.model.items()} | states

    def rename(self, table: Mapping[str, str]) -> None:
        """Give parameters the names in `table`. CheckpointError for those that are not in it."""
        names = renamed(self.model.values(), table)
        self.model = {key: names[name] for key, name in self.model.items()}
        self.states = {key: (names[name], part) for key, (name, part) in self.states.items()}


def parse_keys(source: DcpReader) -> DcpKeys:
    """CheckpointError where there is no model, or an optimizer that does not name its parameters."""
    found, others, roots = DcpKeys(), list[str](), dict[str, None]()
    for key in source.keys:
        entry = _of_optimizer(key, source.paths.get(key, ()))
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
        # A flat model, and further dictionaries beside it.
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
                "what stands under one key without a dot can be taken over, no dictionaries or lists."
            )
    return found


def optimizer_of(
    source: DcpReader, found: DcpKeys, kind: str, table: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """What a manifest says of the optimizer; None where there is none.

    What a group has that is not plain is left out. Without names in its groups there are no groups: then the
    options of the optimizer that loads it stay. `table`: for each parameter that groups name, its name in
    `found`; None: the same. CheckpointError for a state that is not plain.
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
    if table is not None:
        names = renamed(group_of, table)
        group_of = {names[name]: group for name, group in group_of.items()}
    _require_known(group_of, found, source)
    return {"class": kind, "groups": groups, "group_of": group_of, "plain": plain}


def _of_optimizer(key: str, path: tuple[str | int, ...]) -> tuple[str, str, tuple[str, str]] | None:
    """Where the optimizer stands that an entry is of, its part, and its name and key; None for others."""
    for place, word in enumerate(path[:-1]):
        part, _, rest = str(path[place + 1]).partition(".")
        if word in _OPTIMIZERS and part in _PARTS:
            root = ".".join(map(str, path[: place + 1]))
            if len(path) > place + 3 and not rest:
                return root, part, (str(path[place + 2]), ".".join(map(str, path[place + 3 :])))
            return root, part, _last_apart(".".join([*filter(None, [rest]), *map(str, path[place + 2 :])]))
    matched = _FLAT.fullmatch(key) if len(path) < 2 else None
    return None if matched is None else (matched[1], matched[2], _last_apart(matched[3]))


def _last_apart(rest: str) -> tuple[str, str]:
    """`NAME.KEY` in two."""
    name, _, key = rest.rpartition(".")
    return name, key


def _model_prefix(source: DcpReader, tensors: Sequence[str], found: DcpKeys) -> str:
    """What stands before the names of the model's tensors, with the dot behind it.

    CheckpointError where that is not clear.
    """
    there, names = set(tensors), {name for name, _ in found.states.values()}
    if names:
        some = next(iter(names))
        ends = (key.removesuffix(some) for key in tensors if key.endswith(some))
        fitting = {end for end in ends if not end or end.endswith(".")}
        fitting = {end for end in fitting if all(f"{end}{name}" in there for name in names)}
    else:
        fitting = {prefix for key in tensors for prefix in _before_names(key, source)}
        if not fitting:
            return _common(source, tensors, found)
    called = {prefix for prefix in fitting if f".{prefix}".endswith(".model.")}
    fitting = called if len(called) == 1 else fitting
    shortest = min(fitting, key=len, default="")
    if all(prefix.startswith(shortest) for prefix in fitting):  # the others are modules in it
        fitting = fitting & {shortest}
    if len(fitting) > 1:
        raise CheckpointError(
            f"the checkpoint {source.folder} has several models (under "
            f"{listed([prefix.rstrip('.') or 'no key' for prefix in sorted(fitting)])}): write the one that "
            "is meant under the key model."
        )
    if fitting:
        return fitting.pop()
    return _common(source, tensors, found)  # what the optimizer is of is not there: the caller says so


def _before_names(key: str, source: DcpReader) -> list[str]:
    """What stands before a name in a dictionary called `model`, if it is in one."""
    path = source.paths.get(key, ())
    if "model" not in path[:-1]:
        return []
    return [".".join(map(str, path[: path.index("model") + 1])) + "."]


def _common(source: DcpReader, tensors: Sequence[str], found: DcpKeys) -> str:
    """What stands before all names where nothing is called `model`: a dictionary that has all tensors."""
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
    flat = not source.paths or found.states or found.options  # else a module may be called model
    if flat and tensors and all(key.startswith("model.") for key in tensors):
        return "model."
    return ""


def _outermost(keys: Iterable[str], kept: Iterable[str], source: DcpReader) -> list[str]:
    """Keys as they are told: the outermost dictionary of which nothing is kept, or else the key."""

    def prefixes(key: str) -> list[str]:
        path = source.paths.get(key, ()) or (key,)
        return [".".join(map(str, path[:count])) for count in range(1, len(path) + 1)]

    used = {prefix for key in kept for prefix in prefixes(key)}
    return list(dict.fromkeys(next((one for one in prefixes(key) if one not in used), key) for key in keys))


def _options(source: DcpReader, found: DcpKeys) -> dict[str, dict[str, Any]]:
    """What can be told of the options, by group."""
    options: dict[str, dict[str, Any]] = {}
    for key, (group, option) in found.options.items():
        kept = options.setdefault(group, {})
        try:
            value = source.value(key)
        except CheckpointError:
            if option == "params":
                raise  # whose options they are
            found.left_out.append(key)  # an object of some class: options that matter are numbers
            continue
        value = value.item() if getattr(value, "numel", int)() == 1 else value
        if not _is_plain(value):
            found.left_out.append(key)
        elif option != "param_names":
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


def _require_known(names: Iterable[str], found: DcpKeys, source: DcpReader) -> None:
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
