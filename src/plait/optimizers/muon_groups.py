"""The options of `Muon`: their checks, and the parameter groups of an optimizer that is Muon and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from torch import nn

from plait.errors import PlanError, listed
from plait.optimizers.newton_schulz import coefficients_of_steps, learning_rate_factor
from plait.plan.argument_checks import require_flag, require_instance, require_number, require_whole

_OTHERS_ONLY = ("betas", "amsgrad", "maximize", "use_muon")
"""Options that other implementations have in groups, and that Muon's groups do not take."""
ADAMW_OPTIONS: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Those of `torch.optim.AdamW`."""


def muon_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked copy of Muon's options for a group. Raises PlanError for values it cannot use."""
    for name in ("lr", "weight_decay", "momentum", "eps"):
        require_number(name, options[name], PlanError)
    require_flag("nesterov", options["nesterov"], PlanError)
    require_whole("ns_steps", options["ns_steps"], PlanError, least=1)
    coefficients_of_steps(options["ns_coefficients"], options["ns_steps"])
    learning_rate_factor(options["adjust_lr_fn"], 1, 1)
    return dict(options)


def adamw_options(others: object) -> dict[str, Any]:
    """Return AdamW's options as given in `others`; {} for None. Raises PlanError for unusable values."""
    given = {} if others is None else others
    require_instance("others", given, Mapping, "give a dictionary of AdamW's options", PlanError)
    assert isinstance(given, Mapping)
    for name in given.keys() & {"lr", "eps", "weight_decay"}:
        require_number(f"{name} of others", given[name], PlanError)
    betas = given.get("betas", (0.0, 0.0))
    numbers = isinstance(betas, list | tuple) and all(isinstance(one, Real) for one in betas)
    if not numbers or len(betas) != 2 or not all(0 <= one < 1 for one in betas):
        raise PlanError(f"betas of others is {betas!r}: give two numbers of at least 0 and below 1.")
    return dict(given)


def option_groups(
    groups: Iterable[Mapping[str, Any]],
    options: Mapping[str, Any],
    others: Mapping[str, Any],
    is_matrix: Callable[[nn.Parameter], bool],
) -> list[dict[str, Any]]:
    """Return the given parameter groups, each divided into hidden matrices, other matrices, and vectors.

    `options` and `others`: those of Muon and of AdamW where a group does not have its own, which for AdamW
    is in the dictionary `others` of the group. Vectors are not decayed, but by a group's own decay in it.
    What else a group has, such as a factor of its learning rate, all three have, or what its `others` have in
    place of it. Each entry `algorithm` is "muon" or "adamw".
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        own = {name: value for name, value in group.items() if name in options}
        more = {name: group[name] for name in group if name not in (*options, "params", "others")}
        misplaced = [name for name in _OTHERS_ONLY if name in group and "algorithm" not in group]
        if misplaced:
            raise PlanError(
                f"a group of Muon has {listed(misplaced)}: it chooses the hidden matrices itself, and takes "
                "the options of AdamW for other parameters in the group's dictionary others."
            )
        of_group = adamw_options(group.get("others"))
        of_others = {**more, **others, **of_group}
        _require_known(of_others, (*ADAMW_OPTIONS, *more), "AdamW")
        members: list[nn.Parameter] = list(group["params"])
        hidden = [one for one in members if is_matrix(one)]
        rest = [one for one in members if not is_matrix(one)]
        found += [
            {"params": hidden, "algorithm": "muon", **more, **muon_options({**options, **own})},
            {"params": [one for one in rest if one.dim() >= 2], "algorithm": "adamw", **of_others},
            {"params": [one for one in rest if one.dim() < 2], "algorithm": "adamw", **of_others}
            | {"weight_decay": of_group.get("weight_decay", 0.0)},
        ]
    return found


def _require_known(given: Iterable[str], known: Iterable[str], kind: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise PlanError(f"{kind} has no option {listed(unknown)}: its options are {', '.join(known)}.")
