"""`LayerRecheck`: another data-parallel rank computes randomly drawn runs of layers again, and compares.

Each rank sends what a run of its layers read and wrote to the next rank along `dp`, which has the same layers
with the same parameters, and runs those of the rank before it. Ranks along `tp` and `cp` do so together.

    F   input                          → output
    I   gradients of the output        → gradients of the input
    W   gradient buffers before        → gradient buffers after

What both ranks compute must have the same bits. Where it has not, all ranks along `dp` compute the run once
more, also the one whose it is: by what most of them get, the rank that was wrong is named.
"""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from plait.engine.corruption.layer_rerun import (
    LayerRerun,
    Results,
    RunPlace,
    SentRecord,
    snapshot,
    tensors_of_record,
)
from plait.engine.pipeline.layer_run_copies import LayerRecord
from plait.engine.runner import Runtime
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.replica_check import salt_of
from plait.errors import CorruptionError
from plait.plan.axes import STAGE_AXES
from plait.ranks.collectives import all_reduce, all_to_all_uneven, broadcast
from plait.ranks.consistency_check import all_numbers, tensor_hash
from plait.ranks.text_collectives import all_gather_text, first_nonempty_text


class _Drawn(NamedTuple):
    """A run of layers on this rank that was drawn to be computed again by another rank."""

    place: RunPlace
    record: LayerRecord
    described: Sequence[str]
    """What each rank along `dp` says of its run of these layers, as JSON."""


class LayerRecheck:
    """Draws runs of layers in each step, and lets the next rank along `dp` compute them again."""

    def __init__(self, runtime: Runtime, rate: float) -> None:
        """`rate`: the probability with which a run is drawn."""
        self._runtime, self._mesh, self._rate = runtime, runtime.mesh, rate
        self.rechecked = 0
        """How many runs this rank has computed again."""

    def begin_pass(self) -> None:
        """Draw the layer runs to compute again, alike on all ranks of a stage, and have them recorded."""
        passes = self._runtime.dropout.step
        drawn = random.Random(f"recheck {passes} {self._mesh.index('pp')}")
        for stage in self._runtime.pipeline.stages.values():
            stage.records = {
                (microbatch, layer): LayerRecord(partial(snapshot, self._runtime, stage, layer))
                for microbatch in range(self._runtime.blueprint.plan.microbatches)
                for layer in range(len(stage.layers))
                if drawn.random() < self._rate
            }

    def end_pass(self, gatherer: Gatherer, compare_memory: Callable[[], None]) -> None:
        """Compute the previous `dp` rank's drawn runs again. Raises CorruptionError where bits differ.

        On all ranks of the stage; before, `compare_memory` is called, which raises it on a rank whose memory
        is the reason. Communication: over `dp` what each run has read and written, where any was
        drawn 8 bytes over `dp_cp` and `tp`; where bits differ that run once more over `dp`.
        """
        rerun, group = LayerRerun(self._runtime, gatherer), self._mesh.group("dp")
        every, wrong = self._taken(rerun), 0
        for number, one in enumerate(every):
            found, expected = rerun.run(one.place, one.record, self._exchanged(one), self._told(one, -1))
            self.rechecked += 1
            if differing(found, expected):
                wrong = 1 + number * group.size + (group.index - 1) % group.size
        for axis in STAGE_AXES if every else ():
            code = torch.tensor(wrong, device=self._mesh.device)
            wrong = int(all_reduce(code, self._mesh.group(axis), "max", checked=False).wait())
        if wrong:
            compare_memory()
            number, source = divmod(wrong - 1, group.size)
            self._raise(rerun, every[number], source)

    def _taken(self, rerun: LayerRerun) -> list[_Drawn]:
        """Stop recording; return this pass's drawn runs whose shapes are the same on all ranks of `dp`."""
        every, group = [], self._mesh.group("dp")
        for number, stage in self._runtime.pipeline.stages.items():
            records, stage.records = stage.records, {}
            for (microbatch, first), record in records.items():
                if record.last < 0:  # a layer before it ran together with it
                    continue
                place = RunPlace(number, microbatch, first)
                text = json.dumps(rerun.described(place, record))
                described = all_gather_text(text, group, self._mesh.device)
                if len({json.loads(one)["shapes"] for one in described}) == 1:
                    every.append(_Drawn(place, record, described))
        return every

    def _told(self, one: _Drawn, steps: int) -> dict[str, object]:
        """Return the description of the run drawn by the rank `steps` further along `dp`, from JSON."""
        group = self._mesh.group("dp")
        told: dict[str, object] = json.loads(one.described[(group.index + steps) % group.size])
        return told

    def _exchanged(self, one: _Drawn) -> SentRecord:
        """Send this rank's recorded tensors to the next rank along `dp`; return those of the rank before."""
        group, packed = self._mesh.group("dp"), _packed(tensors_of_record(one.record))
        sent, received = [0] * group.size, [0] * group.size
        sent[(group.index + 1) % group.size] = received[(group.index - 1) % group.size] = len(packed)
        arriving = all_to_all_uneven(packed, group, sent, received, most=len(packed), checked=False)
        return _unpacked(one.record, arriving.about("a run of layers that is computed again").wait())

    def _raise(self, rerun: LayerRerun, one: _Drawn, source: int) -> None:
        """Compute a run of rank `source` on all ranks along `dp`, and raise CorruptionError: who differs."""
        group, device = self._mesh.group("dp"), self._mesh.device
        packed = broadcast(_packed(tensors_of_record(one.record)), group, source, checked=False).wait()
        sent = _unpacked(one.record, packed)
        found, expected = rerun.run(one.place, one.record, sent, self._told(one, source - group.index))
        votes = all_numbers(results_hash(found), group, device, "results of layers")
        hosts = all_gather_text(socket.gethostname(), group, device)
        original, names = results_hash(expected), differing(found, expected)
        results = first_nonempty_text("\n".join(names), group, device).splitlines()
        wrong = sorted(wrong_ranks(original, votes, source)) if results else [(source + 1) % group.size]
        named = [f"rank {group.ranks[index]} on host {hosts[index]}" for index in wrong]
        error = self._sentence(one, results or ["a result"], named), [group.ranks[index] for index in wrong]
        told = json.dumps(error) if results else ""
        for axis in STAGE_AXES:  # a result may differ on one of them only
            told = first_nonempty_text(told, self._mesh.group(axis), device)
        # Without any: every rank gets what the first run gave, so the one that computed it again was wrong.
        sentence, ranks = json.loads(told) if told else error
        raise CorruptionError(sentence, self._runtime.dropout.step, ranks)

    def _sentence(self, one: _Drawn, results: Sequence[str], named: Sequence[str]) -> str:
        """Return the error's text: what differs, on which ranks, and what to do."""
        step, place = self._runtime.dropout.step + 1, one.place
        layers = self._runtime.pipeline.stages[place.stage].layers
        first, last = layers[place.first].path, layers[one.record.last].path
        which = f"layer {first!r}" if first == last else f"layers {first!r} to {last!r}"
        more = f" and {len(results) - 1} more results" if len(results) > 1 else ""
        computes = "computes" if len(named) == 1 else "compute, one of them wrongly,"
        known = f"a checkpoint or snapshot of step {step - 1} or before" if step > 1 else "the start"
        which = f"{which}, micro-batch {place.microbatch} of step {step}"
        return (
            f"{' and '.join(named)} {computes} {results[0]}{more} of {which}, with other bits than other "
            f"ranks do from the same values: go on from {known} without that device or host; where the "
            "ranks' devices, threads or libraries are unlike, set recheck_rate to 0."
        )


def wrong_ranks(original: int, votes: Sequence[int], source: int) -> list[int]:
    """Return the indices of the ranks whose hash of one run's results differs from that of the majority.

    `original`: of the rank at index `source`, in the step; `votes`: of each rank, afterwards. The next rank
    has computed the run, too, with another result than `original`. Two where it cannot be said which.
    """
    checker = (source + 1) % len(votes)
    right, count = Counter(votes).most_common(1)[0]
    if 2 * count <= len(votes):
        return [source] if votes[source] != original else [source, checker]
    wrong = {index for index, vote in enumerate(votes) if vote != right}
    wrong |= {source} if original != right else set()
    return sorted(wrong) or [checker]


def differing(found: Results, expected: Results) -> list[str]:
    """Return the names of the results of two computations of one run that differ in any bit."""
    pairs = zip(found, expected, strict=True)
    names = [name for (name, one), (_, other) in pairs if not torch.equal(_bytes(one), _bytes(other))]
    return list(dict.fromkeys(names))


def results_hash(results: Results) -> int:
    """Return a 64-bit hash of all bits of results."""
    each = ((number, name, int(tensor_hash(one))) for number, (name, one) in enumerate(results))
    total = sum(value * salt_of(f"{number} {name}")[1] for number, name, value in each)
    return (total + 2**63) % 2**64 - 2**63


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors one after another."""
    return torch.cat([_bytes(one) for one in tensors])


def _unpacked(own: LayerRecord, packed: Tensor) -> SentRecord:
    """Return the tensors that another rank's `_packed` wrote one after another as bytes."""
    mine = tensors_of_record(own)
    parts = torch.split(packed, [one.nbytes for one in mine])
    # Cloned, so that each lies where tensors are allocated, as on the other rank.
    return SentRecord.of(
        own, [part.clone().view(one.dtype).view(one.shape) for part, one in zip(parts, mine, strict=True)]
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
