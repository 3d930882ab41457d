"""`Owned`: any optimizer that needs whole parameters; each parameter is updated by the rank that owns it.

    gradients, in shards  ──all-to-all──▶   whole gradients, with their owners
                                                  │ the optimizer, unchanged
    parameters, in shards ◀──all-to-all──   whole parameters, updated

The owner keeps a copy of the whole parameter, in the dtype that the optimizer updates, with all of its state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.optimizers.engine_parameters import EngineParameters, GivenGroups
from plait.optimizers.flattened_state import flat_state, nested_state
from plait.optimizers.owned_parts import own_parts
from plait.optimizers.part_owners import whole_parts
from plait.proof.optimizer_proof import require_parameterwise

NOT_SHARED = frozenset({"params", "param_names"})
"""What a group of this optimizer and the owner's group have of their own."""


class Owned(Optimizer):
    """Runs an optimizer that needs whole parameters, under any plan: a parameter's owner rank updates it.

    Its `param_groups` have this rank's shards, and the options of the class: schedulers change them as usual.
    `state` has the state of the parameters that this rank owns, by shard.
    """

    communicates = True

    def __init__(
        self, kind: type[Optimizer], engine: Engine, params: GivenGroups | None = None, **settings: Any
    ) -> None:
        """Make an optimizer of class `kind` with `settings` on each rank, for the parameters that it owns.

        All ranks call it with the same arguments. `params` are the engine's, by default all that train: an
        iterable of them, or of groups with options. Raises PlanError for a class that needs all parameters at
        once. Memory: of the parameters that this rank owns a copy, a gradient and the state; buffers for what
        it sends and receives. What is written to a parameter by `.data`, which torch does not count, is lost
        in the next step: call `read_parameters` after it. Communication: the names of the parameters, and
        their values to the owners.
        """
        if not isinstance(kind, type) or not issubclass(kind, Optimizer):
            given = kind.__name__ if isinstance(kind, type) else f"an object of {type(kind).__name__}"
            raise PlanError(
                f"plait.Owned was given {given} in place of an optimizer's class: give the class, then the "
                "engine, such as plait.Owned(torch.optim.Adafactor, engine, lr=0.01)."
            )
        self._parameters = EngineParameters(engine, f"Owned({kind.__name__})")
        groups = self._parameters.groups(params)
        everyone, kinds = self._parameters.require_same(groups), engine.blueprint.kinds
        parts = whole_parts(engine.layouts, everyone)
        dtypes = {part.parameter: getattr(torch, kinds[part.parameter].master.name) for part in parts}
        self.owned = own_parts(engine, parts, dtypes)
        """Which rank owns which parameter, and how they are exchanged."""
        self._part_of = {part.parameter: part for part in self.owned.parts}
        self.whole_parameters = {
            shard: nn.Parameter(torch.empty(part.box.sizes, dtype=shard.dtype, device=shard.device))
            for name, shard in self._parameters.shards.items()
            if name in everyone and (part := self._part_of[name]).owner == engine.mesh.rank
        }
        """The whole parameters that this rank owns, by its shards of them."""
        super().__init__(groups, {})
        self._versions: dict[nn.Parameter, int] = {}
        self.read_parameters()
        owned = self.whole_parameters
        owned_groups = (
            {**group, "params": [owned[one] for one in group["params"] if one in owned]} for group in groups
        )
        self._of_owner = kind(list(owned_groups), **settings)
        require_parameterwise(self._of_owner, settings)
        self.defaults = self._of_owner.defaults
        self._take_over()

    @property
    def class_name(self) -> str:
        """The name of the optimizer's class, for checkpoints."""
        return type(self._of_owner).__name__

    def state_rank(self, parameter: nn.Parameter) -> int:
        """Return the global rank that has the whole state of a parameter, given this rank's shard of it."""
        return self._part_of[self._parameters.names[id(parameter)]].owner

    @torch.no_grad()
    def read_parameters(self) -> None:
        """Copy the values of all shards to their owners' whole parameters, after others have changed them.

        All ranks call it. `plait.load` does. Communication: one all-to-all for each dtype, as of gradients.
        """
        for shard in self._shards():
            self.owned.put(self._parameters.names[id(shard)], shard.detach())
        self.owned.gather()
        for shard, whole in self.whole_parameters.items():
            whole.copy_(self._exchanged(shard))
        self._versions = {shard: shard._version for shard in self._shards()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; does nothing where no parameter has a gradient. All ranks call it.

        Raises PlanError where a parameter was changed since the last step. Communication: two all-to-alls
        for each dtype, over the ranks of a stage (of several where a parameter is tied across them): of each
        gradient what its owner does not hold, and of each parameter every rank's shard.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._parameters.have_gradients(self.param_groups):
            return loss
        self._require_unchanged()
        for shard in self._shards():
            assert shard.grad is not None
            self.owned.put(self._parameters.names[id(shard)], shard.grad)
        self.owned.gather()
        for shard, whole in self.whole_parameters.items():
            whole.grad = self._exchanged(shard).to(whole.device)
        self._hand_over()
        with torch.enable_grad():
            self._of_owner.step()
        self._take_over()
        for shard, whole in self.whole_parameters.items():
            whole.grad = None
            self._exchanged(shard).copy_(whole)
        self.owned.give_back()
        self._copy_to_shards()
        return loss

    def _shards(self) -> list[nn.Parameter]:
        """Return this rank's shards of the optimizer's parameters."""
        return [one for group in self.param_groups for one in group["params"]]

    def _exchanged(self, shard: nn.Parameter) -> Tensor:
        """Return the whole tensor by which a parameter that this rank owns is exchanged."""
        return self.owned.wholes[self._part_of[self._parameters.names[id(shard)]].number]

    def _require_unchanged(self) -> None:
        """Raise PlanError where a parameter was written to since the owners have its value."""
        for shard, version in self._versions.items():
            if shard._version != version:
                raise PlanError(
                    f"{self._parameters.names[id(shard)]} was changed since the last step of "
                    f"Owned({self.class_name}), of which owners keep copies: call the optimizer's "
                    "read_parameters() on all ranks after changing parameters."
                )

    def _hand_over(self) -> None:
        """Copy options, and the state of parameters that this rank owns, to the inner optimizer."""
        for group, of_owner in zip(self.param_groups, self._of_owner.param_groups, strict=True):
            of_owner.update({key: value for key, value in group.items() if key not in NOT_SHARED})
        self._of_owner.state = defaultdict(dict)
        for shard, whole in self.whole_parameters.items():
            if state := self.state.get(shard):
                self._of_owner.state[whole] = nested_state(state)

    def _take_over(self) -> None:
        """Copy options and state of the wrapped optimizer to this one, after its step."""
        for group, of_owner in zip(self.param_groups, self._of_owner.param_groups, strict=True):
            group.update({key: value for key, value in of_owner.items() if key not in NOT_SHARED})
        for shard, whole in self.whole_parameters.items():
            if state := self._of_owner.state.get(whole):
                self.state[shard] = flat_state(state)

    def _copy_to_shards(self) -> None:
        """Copy the updated values that owners have sent back to this rank's shards."""
        for shard in self._shards():
            for piece in self.owned.pieces_of(self._parameters.names[id(shard)]):
                piece.of(shard.detach()).copy_(piece.exchanged)
        self._versions = {shard: shard._version for shard in self._shards()}
