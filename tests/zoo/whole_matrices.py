"""Mistakes of an optimizer of whole matrices: what is orthogonalized, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import plait
from plait.optimizers import muon
from plait.optimizers.hidden_matrices import ParameterMatrices, parameter_matrices
from plait.optimizers.matrix_parts import divided_matrix
from plait.optimizers.newton_schulz import orthogonalized
from plait.optimizers.part_exchange import PartExchange
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.fine_tuning import NORMS
from zoo.patching import rank
from zoo.row import ONE_STEP, TWO_STEPS, Named, Row

STEP = replace(ONE_STEP, optimizer=partial(plait.Muon, lr=0.02))
STEPS = replace(TWO_STEPS, optimizer=partial(plait.Muon, lr=0.02))
BOTH = (0, 1)


def each_shard_orthogonalized_by_itself() -> Any:
    """Ranks orthogonalize the rows that they have, and send nothing."""

    def of_shards(*model: Any, **options: Any) -> dict[str, ParameterMatrices]:
        found = parameter_matrices(*model, **options)
        return {name: replace(one, parts=_halves(one)) if one.parts else one for name, one in found.items()}

    return patch.object(muon, "parameter_matrices", of_shards)


def _halves(one: ParameterMatrices) -> Any:
    rows, columns = one.shape
    return tuple(divided_matrix((), (rows, columns), [rows // 2] * 2))


def orthogonalized_in_blocks() -> Any:
    """Two blocks of input features, as ranks of tp have them, are orthogonalized apart."""

    def in_blocks(matrices: Tensor, *options: Any) -> Tensor:
        return torch.cat([orthogonalized(block, *options) for block in matrices.chunk(2, -1)], -1)

    return patch.object(muon, "orthogonalized", in_blocks)


def momentum_of_another_parameter() -> Any:
    """Rank 1 sends the owner of a matrix the momentum of the one before it."""
    original, before = plait.Muon._put_momentum, dict[Any, Tensor]()

    def put(self: plait.Muon, parameter: nn.Parameter, group: Any) -> None:
        original(self, parameter, group)
        mean = self.state[parameter]["momentum_buffer"]
        other = before.get(mean.shape)
        before[mean.shape] = mean.clone()
        if rank() == 1 and other is not None:
            for piece in self.owned.pieces_for_owners(self._parameters.names[id(parameter)]):
                piece.exchanged.copy_(piece.of(other))

    return patch.object(plait.Muon, "_put_momentum", put)


def query_key_and_value_as_one_matrix() -> Any:
    """The rules that declare the matrices of a joined linear are not read."""

    def undeclared(sequence: Any, rules: Any, **options: Any) -> dict[str, ParameterMatrices]:
        return parameter_matrices(sequence, {}, **options)

    return patch.object(muon, "parameter_matrices", undeclared)


def update_of_the_step_before() -> Any:
    """The second all-to-all of later steps does not take place: other ranks than the owner keep updates."""
    original, seen = PartExchange.give_back, set[PartExchange]()

    def give_back(self: PartExchange) -> None:
        if self not in seen:
            original(self)
        seen.add(self)

    return patch.object(PartExchange, "give_back", give_back)


def _row(defect: Any, parameter: str, ranks: Sequence[int] | None = BOTH, **more: Any) -> Row:
    step = more.pop("step", 0)
    named = Named(
        phase=StepPhase.OPTIMIZER,
        parameter=parameter,
        step=step,
        ranks=None if ranks is None else tuple(ranks),
    )
    defaults = {"model": cases.LLAMA, "plan": cases.CUT_PARAMETERS, "options": STEPS if step else STEP}
    return Row(defect=defect, named=named, **defaults | more)


WHOLE_MATRICES = (
    _row(each_shard_orthogonalized_by_itself, "blocks.0.attention.key.weight"),
    _row(orthogonalized_in_blocks, "blocks.0.attention.key.weight", plan=cases.TWO_PARTS),
    _row(momentum_of_another_parameter, "blocks.0.attention.value.weight", plan=cases.TWO_PARTS),
    _row(query_key_and_value_as_one_matrix, "block.joined.weight", model=NORMS, plan=cases.TWO_PARTS),
    _row(update_of_the_step_before, "blocks.0.attention.key.weight", None, step=1),
)
