"""The optimizer of a new engine: that of the old one with other parameters, or one made by a joining rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.optimizer_options import set_options
from plait.checkpoint.optimizer_state import NOT_RESTORED, number_device
from plait.engine.engine import Engine
from plait.proof.optimizer_proof import communicating_class

OptimizerMaker = Callable[..., Optimizer]
"""Returns an optimizer of parameter groups, or of the engine where its class exchanges parameters."""
Members = Sequence[Sequence[nn.Parameter]]
"""The parameters of each group."""


class OptimizerOfEngine(Protocol):
    """An optimizer that exchanges parameters between the ranks of an engine, and can go on with another."""

    def use_engine(self, engine: Engine) -> None:
        """Go on with the parameters of another engine, which the groups have already."""


def go_on_with(optimizer: Optimizer, engine: Engine) -> None:
    """Switch an optimizer that communicates to another engine; leave other optimizers as they are."""
    if communicating_class(type(optimizer)) is not None:
        cast(OptimizerOfEngine, optimizer).use_engine(engine)


def members_of_groups(engine: Engine, saved: Mapping[str, Any]) -> list[list[nn.Parameter]]:
    """Return this rank's parameters in each group of a described optimizer, in the order of the model."""
    found: list[list[nn.Parameter]] = [[] for _ in saved["groups"]]
    for name, parameter in engine.named_parameters():
        if name in saved["group_of"]:
            found[saved["group_of"][name]].append(parameter)
    return found


def regroup(optimizer: Optimizer, saved: Mapping[str, Any], numbers: Sequence[int], members: Members) -> None:
    """Set an optimizer's groups to `saved` with the parameters `members`, in place, and clear its state.

    Its schedulers go on with it.
    `numbers`: which of them its own groups are; others are added, with their options.
    """
    own = dict(zip(numbers, optimizer.param_groups[:], strict=True))
    optimizer.state.clear()
    optimizer.param_groups.clear()
    for number, options in enumerate(saved["groups"]):
        if number in own:
            own[number]["params"] = list(members[number])
            optimizer.param_groups.append(own[number])
        else:
            optimizer.add_param_group({"params": list(members[number])})
            _restore(optimizer.param_groups[-1], options)


def made_optimizer(
    make: OptimizerMaker, engine: Engine, saved: Mapping[str, Any], members: Members
) -> Optimizer:
    """Return a new optimizer from `make`, with the groups `saved`, their options, and new parameters."""
    if communicating_class(make) is None:
        optimizer = make([{"params": list(each)} for each in members])
    else:
        optimizer = make(engine)
        made = optimizer.param_groups[:]
        optimizer.state.clear()
        optimizer.param_groups.clear()
        for options, each in zip(saved["groups"], members, strict=True):
            optimizer.param_groups.append({**_most_alike(made, options), "params": list(each)})
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        _restore(group, options)
    return optimizer


def _most_alike(groups: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with the most names of `options`, whose values have the types that they need."""
    return max(groups, key=lambda group: len(group.keys() & options.keys()))


def _restore(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    set_options(group, {key: value for key, value in options.items() if key not in NOT_RESTORED})


def set_state(
    optimizer: Optimizer,
    engine: Engine,
    saved: Mapping[str, Any],
    arrived: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Set the state of each parameter: tensors that have `arrived`, and plain values that were described."""
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    for name, parameter in engine.named_parameters():
        if id(parameter) not in group_of:
            continue
        state: dict[str, Any] = dict(saved["plain"].get(name, {}))
        for key, value in arrived.get(name, {}).items():
            device = value.device if value.dim() else number_device(key, group_of[id(parameter)], parameter)
            state[key] = value.to(device)
        if state:
            optimizer.state[parameter] = state
