"""Lower bounds of the memory of a plan, for every cut of the model into stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from plait.estimate.memory.decoder_layer_memory import layer_memory
from plait.estimate.memory.state_memory import ParameterCounts, state_bytes, whole_gradients
from plait.estimate.time.decoder_operations import MicrobatchShape
from plait.plan.decoder_sizes import Decoder, LayerKind
from plait.schedules.action import Kind

KINDS: tuple[LayerKind, ...] = ("embedding", "attention", "mlp", "head")
WHOLE = ("1f1b", "gpipe", "interleaved")
"""Policies with full backwards, of which a rank's last is one of its first stage. They may run in two parts,
see `Plan.sends_inputs_first`."""
LINEAR = ("1f1b", "gpipe", "zb-h1", "zb-h2")
"""Policies of one stage on each rank."""
WARM = ("1f1b", "zb-h1", "zb-h2")
"""Policies in which rank r holds p − r micro-batches or more at once."""


class ModelParameters(NamedTuple):
    """Parameter counts on a tensor-parallel rank: of the whole model, the head, and the largest layers."""

    whole: float
    head: float
    smallest: float
    """Of the smallest layer."""
    largest: float
    pair: float
    """The most of two layers that follow each other."""


class _Activations(NamedTuple):
    """Bytes of activations of one micro-batch."""

    kept: float
    """What all layers keep until their input gradients."""
    head: float
    """What the head keeps."""
    forward: float
    """What the head's forward and the loss allocate beside it."""
    backward: float
    """What the head's backward allocates."""

    def temporary(self, *, buffers: bool) -> float:
        """Return the bytes that the head allocates; in its backward, where `buffers` hold whole gradients."""
        return self.backward if buffers else max(self.forward, self.backward)


@dataclass(frozen=True)
class MemoryBounds:
    """Computes lower bounds of the memory of plans of one decoder, however it is cut into stages."""

    model: Decoder
    _parameters: dict[int, ModelParameters] = field(default_factory=dict)
    _activations: dict[tuple[object, ...], _Activations] = field(default_factory=dict)

    def least(self, shape: MicrobatchShape, policy: str | None, *, gathered: bool = True) -> float:
        """Return a lower bound of the largest rank's bytes under a schedule policy (None: under any).

        `gathered`: count what plans with more copies of state need less of: buffers for whole parameters, and
        shards of gradients beside whole ones. It is the largest of three bounds: when the last stage has run
        a forward and all keep a micro-batch; after a backward, when whole gradients are allocated too, and
        with one stage a rank the next micro-batch is kept; and that of a rank with the head alone.
        """
        parameters, activations = self.parameters(shape.plan.tp), self._kept(shape)
        mean = _in_a_row(parameters.whole / shape.plan.pp)
        state, buffers = state_bytes(shape, mean), gathered and not shape.kind.keeps_gradients
        shards = sum(state[:3])
        least = self._held_at_once(shape, policy, shards, buffers=buffers)
        added = whole_gradients(shape, mean, splits=False).always
        if added:
            both = shards + added - (0.0 if gathered else state[1])
            after = self._held_at_once(shape, policy, both, buffers=buffers, after_backward=True)
            least = max(least, after)
        alone = sum(state_bytes(shape, _in_a_row(parameters.head))[:3]) + activations.head
        alone += activations.temporary(buffers=buffers)
        alone += _buffers(shape, parameters.head, policy) if buffers else 0.0
        return max(least, alone)

    def _held_at_once(
        self,
        shape: MicrobatchShape,
        policy: str | None,
        state: float,
        *,
        buffers: bool,
        after_backward: bool = False,
    ) -> float:
        """Return a number of bytes that at least one rank must hold, from the mean of all ranks.

        `state`: bytes of parameters, gradients and optimizer state of the mean rank.

        Let rank r hold c_r of state, and k_r micro-batches of a_r each at once. Then the largest memory is
        M ≥ c_r + k_r · a_r for every r, and the (M − c_r) / k_r add up to the sum of the a_r at least. With
        k_r = 1 that is the mean. To the c_r of one rank belongs the head's temporary memory, to that of one
        the buffers for the largest layer.
        """
        ranks, held = shape.plan.pp, shape.plan.microbatches - after_backward
        activations, every = self._kept(shape), 0.0
        one = activations.temporary(buffers=buffers)
        if buffers:
            every, largest = (
                _buffers(shape, count, policy, after_backward=after_backward)
                for count in self._buffered(shape, policy)
            )
            one += largest - every
        # After a backward the stage that runs may be the smallest of several, or no micro-batch may be left.
        if after_backward and (policy not in LINEAR or held == 0):
            return state + every
        least = state + (activations.kept + one) / ranks
        if policy in WARM:
            at_once = [min(held, ranks - rank) for rank in range(ranks)]
            whole = activations.kept + (state * ranks + one) / at_once[0]
            least = max(least, whole / sum(1 / count for count in at_once))
        return least + every

    def _buffered(self, shape: MicrobatchShape, policy: str | None) -> tuple[float, float]:
        """Return the fewest parameters gathered at once: on every rank, and on the rank with most."""
        counted = self.parameters(shape.plan.tp)
        if shape.plan.pp > 1 or policy not in LINEAR:  # a stage may have one layer
            return counted.smallest, counted.largest
        return counted.pair, counted.pair

    def _kept(self, shape: MicrobatchShape) -> _Activations:
        """Return the bytes of activations of all layers, and of the head, for one micro-batch."""
        plan, recompute = shape.plan, shape.plan.recompute
        assert not isinstance(recompute, tuple)
        key = plan.tp, plan.cp, shape.rows, plan.sequence_parallel, recompute
        if key not in self._activations:
            layers = {kind: layer_memory(kind, recompute, shape) for kind in KINDS}
            kept = sum(layers[kind].until_inputs for kind in self.model.kinds)
            head = layers["head"]
            forward = head.forward - head.until_inputs
            self._activations[key] = _Activations(kept, head.until_inputs, forward, head.backward)
        return self._activations[key]

    def parameters(self, tp: int) -> ModelParameters:
        """Return the model's parameter counts on one of `tp` tensor-parallel ranks."""
        if tp not in self._parameters:
            each = {kind: self.model.parameters(kind, tp) for kind in KINDS}
            pair = max(each[one] + each[other] for one, other in pairwise(self.model.kinds))
            whole, head = (self.model.parameters_of(kinds, tp) for kinds in (self.model.kinds, ("head",)))
            self._parameters[tp] = ModelParameters(whole, head, min(each.values()), max(each.values()), pair)
        return self._parameters[tp]


def _buffers(
    shape: MicrobatchShape, count: float, policy: str | None, *, after_backward: bool = False
) -> float:
    """Return the bytes of whole parameters and gradients with which a rank runs a backward of such layers.

    `after_backward`: of the parameters alone.
    """
    sizes, kind = _in_a_row(count), Kind.B if policy in WHOLE else Kind.I
    found = state_bytes(shape, sizes)[3]
    return found if after_backward else found + whole_gradients(shape, sizes, splits=False).of_layers(kind)


def _in_a_row(count: float) -> ParameterCounts:
    """Return the `ParameterCounts` of a rank with `count` parameters that are all gathered at once."""
    return ParameterCounts(count, 0.0, count)
