"""`OptimizerSet`: one or several optimizers of an engine's parameters, which a checkpoint holds as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, cast

from torch import nn
from torch.optim import Optimizer

from plait.errors import CheckpointError
from plait.plan.argument_checks import require_instance


class WholeStates(Protocol):
    """An optimizer that keeps the whole state of a sharded parameter on a single rank."""

    class_name: str
    """The class of which it makes an optimizer on each rank."""
    whole_parameters: Mapping[nn.Parameter, nn.Parameter]
    """The whole parameters that this rank owns, by its shards of them."""

    def state_rank(self, parameter: nn.Parameter) -> int:
        """Return the global rank that has the state of a parameter, given this rank's shard of it."""

    def read_parameters(self) -> None:
        """Copy parameters to their owners' whole copies after others, such as `load`, wrote to the shards.

        All ranks call it.
        """


GivenOptimizers = Optimizer | Sequence[Optimizer] | None
"""One optimizer, several of different parameters, or none."""


@dataclass(frozen=True, eq=False)
class OptimizerSet:
    """Optimizers of different parameters: their groups one after another, and the state of each parameter."""

    members: tuple[Optimizer, ...]

    @staticmethod
    def of(given: GivenOptimizers) -> OptimizerSet | None:
        """Return the given optimizers as a set; None for none. Raises CheckpointError for anything else."""
        if given is None:
            return None
        members = tuple(given) if isinstance(given, Sequence) else (given,)
        for one in members:
            remedy = "give one of torch.optim, a list of them, or None"
            require_instance("the optimizer", one, Optimizer, remedy, CheckpointError)
        if not members:
            raise CheckpointError("the list of optimizers is empty: give at least one, or None.")
        return OptimizerSet(members)

    @property
    def kind(self) -> str:
        """The names of the optimizers' classes, joined by plus signs."""
        return " + ".join(map(_class_name, self.members))

    @property
    def defaults(self) -> set[str]:
        """The names of the options that the optimizers' classes take."""
        return set(chain.from_iterable(one.defaults for one in self.members))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, one optimizer after another."""
        return [group for one in self.members for group in one.param_groups]

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return the optimizer state of a parameter; an empty dict if it has none."""
        owner = self._owners.get(id(parameter))
        return {} if owner is None else owner.state.get(parameter, {})

    def state_rank(self, parameter: nn.Parameter) -> int | None:
        """Return the only rank that has a parameter's state; None if ranks have state of their shards."""
        owner = whole_states(self._owners.get(id(parameter)))
        return None if owner is None else owner.state_rank(parameter)

    def state_ranks(self) -> list[int]:
        """Return the ranks that alone have the state of parameters of which this rank has a shard."""
        ranks = (self.state_rank(one) for group in self.param_groups for one in group["params"])
        return sorted({rank for rank in ranks if rank is not None})

    def read_parameters(self) -> None:
        """Copy the shards' values to optimizers that keep whole copies of parameters. All ranks call it."""
        for one in map(whole_states, self.members):
            if one is not None:
                one.read_parameters()

    def replace_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Set the optimizer state of a parameter; an empty `state` removes the entry."""
        owner = self._owners[id(parameter)]
        owner.state.pop(parameter, None)
        if state:
            owner.state[parameter] = state

    def members_of(self, names: Mapping[int, str]) -> dict[str, str]:
        """Return the class name of each parameter's optimizer, by parameter name.

        `names`: the parameters' names, by `id`.
        """
        return {
            name: _class_name(self._owners[number])
            for number, name in names.items()
            if number in self._owners
        }

    def require_own_parameters(self, names: Mapping[int, str]) -> None:
        """Raise CheckpointError if optimizers share a parameter, or have one not in `names`."""
        seen: set[int] = set()
        for one in self.members:
            own = {id(parameter) for parameter in _parameters_of(one)}
            for number in own & seen:
                raise CheckpointError(
                    f"two of the optimizers have {names.get(number, 'a parameter')} in common: give each "
                    "parameter to one."
                )
            seen |= own
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"group {number} of the optimizer has a parameter {list(parameter.shape)} that is "
                        "not the engine's: give an optimizer of engine.parameters(), and save others by "
                        "yourself."
                    )

    @cached_property
    def _owners(self) -> dict[int, Optimizer]:
        """The optimizer of each parameter, by its id."""
        return {id(parameter): one for one in self.members for parameter in _parameters_of(one)}


def whole_states(optimizer: Optimizer | None) -> WholeStates | None:
    """Return `optimizer` if one rank has all state of each of its parameters, else None."""
    return cast(WholeStates, optimizer) if hasattr(optimizer, "state_rank") else None


def _class_name(optimizer: Optimizer) -> str:
    own = whole_states(optimizer)
    return type(optimizer).__name__ if own is None else own.class_name


def _parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)
