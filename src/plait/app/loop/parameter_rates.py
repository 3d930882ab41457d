"""Parameters by pattern of their names: learning rates and weight decay of their own, and freezing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from plait.engine.engine import Engine
from plait.errors import ConfigError, listed
from plait.plan.argument_checks import require_instance, require_number

SCALE = "lr_scale"
"""The key of a parameter group by which the learning rate of a run is multiplied."""
_NEAREST = 3


@dataclass(frozen=True)
class ParameterRate:
    """The learning rate and weight decay of the parameters whose names match a pattern."""

    pattern: str
    """Whole parts of a name, with `*`: "embedding", "blocks.*.mlp", "bias"."""
    scale: float = 1.0
    """Factor of the learning rate of the run."""
    weight_decay: float | None = None
    """Of matrices and vectors; None: that of the other parameters."""

    def __post_init__(self) -> None:
        require_instance("the pattern of a ParameterRate", self.pattern, str, "give a text")
        require_number("the scale of a ParameterRate", self.scale)
        if self.weight_decay is not None:
            require_number("the weight_decay of a ParameterRate", self.weight_decay)


def parameter_groups(
    engine: Engine, rates: Sequence[ParameterRate], weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return this rank's optimizer parameter groups: matrices and vectors of each of `rates`, and others.

    Matrices decay by `weight_decay` (None: the optimizer's), vectors do not; but where a rate has a decay of
    its own, both have that. The first rate that fits a name counts. `fit` multiplies its learning rate by
    `lr_scale` of a group. The groups are the same in number and order on every rank, also where a rank has no
    parameters of one. Raises `ConfigError` for a pattern that fits no parameter.
    """
    require_instance("the engine", engine, Engine, "give what plait.parallelize returns")
    if weight_decay is not None:
        require_number("the weight_decay of parameter_groups", weight_decay)
    require_instance("rates", rates, Sequence, "give a list of plait.loop.ParameterRate")
    for rate in rates:
        require_instance("a rate", rate, ParameterRate, "give a plait.loop.ParameterRate")
    names = list(engine.layouts) + list(engine.aliases)
    require_matches([rate.pattern for rate in rates], names, "rates")
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[dict[str, Any]] = []
    for rate in rates:
        own = {} if rate.weight_decay is None else {"weight_decay": rate.weight_decay}
        groups.append({"params": [], SCALE: rate.scale, **decay, **own})
        groups.append({"params": [], SCALE: rate.scale, "weight_decay": 0.0, **own})
    groups += [{"params": [], SCALE: 1.0, **decay}, {"params": [], SCALE: 1.0, "weight_decay": 0.0}]
    others = len(rates)
    also = {name: [other for other, one in engine.aliases.items() if one == name] for name in names}
    for name, parameter in engine.named_parameters():
        if parameter.requires_grad:
            fits = (any(fits_name(rate.pattern, one) for one in (name, *also[name])) for rate in rates)
            number = next((number for number, fitting in enumerate(fits) if fitting), others)
            is_vector = len(engine.layouts[name].shape) < 2
            groups[2 * number + is_vector]["params"].append(parameter)
    return groups


def freeze(model: nn.Module, patterns: Sequence[str], field: str = "freeze") -> None:
    """Set `requires_grad` to False for the parameters of `model` whose names match one of `patterns`.

    Raises `ConfigError`, which names `field`, for a pattern that fits no parameter, and where none is left
    that trains.
    """
    require_instance("the model", model, nn.Module, "give a torch.nn.Module")
    require_instance(field, patterns, Iterable, "give a list of patterns")
    if isinstance(patterns, str):
        raise ConfigError(f"{field} is {patterns!r}: give a list of patterns, such as [{patterns!r}].")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    require_matches(patterns, parameters, field)
    for name, parameter in parameters.items():
        if any(fits_name(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    if patterns and not any(one.requires_grad for one in parameters.values()):
        raise ConfigError(
            f"{field} = [{listed(list(patterns))}] freezes all parameters: leave some of them to train."
        )


def require_matches(patterns: Iterable[str], names: Iterable[str], field: str) -> None:
    """Raise `ConfigError` for a pattern that matches none of `names`, with the most similar names."""
    known = list(names)
    for pattern in patterns:
        require_instance(f"a pattern of {field}", pattern, str, "give a text")
        if not any(fits_name(pattern, name) for name in known):
            near = _nearest(pattern, known)
            raise ConfigError(
                f"the pattern {pattern!r} of {field} fits the name of no parameter: the nearest are "
                f"{', '.join(near)}."
            )


def fits_name(pattern: str, name: str) -> bool:
    """Return whether consecutive components of the dotted `name` match `pattern`."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names with the most similar text or part, or else the first ones."""
    last = pattern.rpartition(".")[2]
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdecimal())
    similar = get_close_matches(last, parts, n=1)
    of_part = [name for name in names if similar and similar[0] in name.split(".")]
    return (get_close_matches(pattern, names, n=_NEAREST) or of_part or list(names))[:_NEAREST]
