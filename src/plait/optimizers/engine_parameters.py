"""The parameters of an engine that an optimizer updates: names, groups, and whether they have gradients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from plait.engine.engine import Engine
from plait.errors import PlanError, listed
from plait.plan.argument_checks import require_instance
from plait.ranks.text_collectives import all_gather_text

GivenGroups: TypeAlias = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]
"""Parameters, or groups of them with options: what torch's optimizers take first."""


class EngineParameters:
    """This rank's parameter shards by name, with checks of an optimizer's groups and gradients.

    For an optimizer whose ranks communicate.
    """

    def __init__(self, engine: Engine, optimizer: str) -> None:
        """`optimizer`: the name of its class, for errors. Raises PlanError unless `engine` is an engine."""
        remedy = "give what plait.parallelize returns"
        require_instance(f"the engine of {optimizer}", engine, Engine, remedy, PlanError)
        self._engine, self._optimizer = engine, optimizer
        self.shards = dict(engine.named_parameters())
        """This rank's shards, by name."""
        self.names = {id(shard): name for name, shard in self.shards.items()}
        """The name of each shard, by its `id`."""
        self._given = frozenset(self.shards)
        """The names of those in the optimizer's groups, on any rank, once these are known."""

    def groups(self, given: GivenGroups | None) -> list[dict[str, Any]]:
        """Return `given` as parameter groups without frozen parameters; None: one group of all that train.

        Raises PlanError for a parameter that is not the engine's.
        """
        remedy = "give engine.parameters(), or a list of groups of them"
        members: list[Any] = list(self.shards.values() if given is None else given)
        groups = [{"params": members}]
        if members and all(isinstance(one, Mapping) for one in members):
            groups = [{**one, "params": _parameters_of(one)} for one in members]
        for group in groups:
            for one in group["params"]:
                require_instance(f"a parameter of {self._optimizer}", one, Tensor, remedy, PlanError)
                if id(one) not in self.names:
                    raise PlanError(
                        f"{self._optimizer} was given a parameter {list(one.shape)} that the engine does not "
                        "have: give those of engine.parameters()."
                    )
            group["params"] = [one for one in group["params"] if one.requires_grad]
        return groups

    def require_same(self, groups: Sequence[Mapping[str, Any]]) -> frozenset[str]:
        """Return names of the parameters in all ranks' `groups`; PlanError if a rank left out one it holds.

        Raises PlanError on all ranks where one has left out a parameter that another has, and both hold.
        Communication: the names, once, over `world`.
        """
        mesh, holders = self._engine.mesh, self._engine.shard_plan.owners
        mine = [self.names[id(one)] for group in groups for one in group["params"]]
        texts = all_gather_text(json.dumps(mine), mesh.group("world"), mesh.device)
        names = [frozenset(json.loads(text)) for text in texts]
        self._given = everyone = frozenset[str]().union(*names)
        for rank, own in enumerate(names):
            stage = mesh.coordinate_of(rank)["pp"]
            for name in sorted(everyone - own):
                if stage in holders[name]:
                    raise PlanError(
                        f"{self._optimizer} has {name} on some ranks and not on rank {rank}, which holds it "
                        "too: give every rank the same parameters."
                    )
        return everyone

    def have_gradients(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the parameters in `groups` have gradients; PlanError if only some of them have.

        False if none has. Raises PlanError where only some have one, and where the parameters are not those
        it was made with.
        """
        held = [one for group in groups for one in group["params"]]
        unknown = [one for one in held if self.names.get(id(one)) not in self._given]
        if unknown:
            raise PlanError(
                f"{self._optimizer} was given a parameter {list(unknown[0].shape)} after it was made: "
                "make a new optimizer."
            )
        without = [one for one in held if one.grad is None]
        if without and len(without) < len(held):
            raise PlanError(
                f"{self.names[id(without[0])]} has no gradient and other parameters have, but all ranks of "
                f"{self._optimizer} exchange all of its parameters: freeze it before parallelize."
            )
        return not without


def _parameters_of(group: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a group, which may be a single one, as in torch."""
    if "params" not in group:
        raise PlanError(f"a parameter group has {listed(sorted(group))} and no params: give them.")
    return [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
