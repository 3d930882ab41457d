"""One rank's part: the reference (on rank 0), then the woven run, compared step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from plait.comm.collectives import barrier
from plait.comm.mesh import Mesh
from plait.composer import parallelize
from plait.engine import Engine
from plait.errors import CommunicationError, ModelError, PlaitError
from plait.layers.layer_sequence import LayerSequence, sequence_of
from plait.layers.nested import Value, map_tensors
from plait.plan import Plan
from plait.verification.case import Case, Ready, prepared
from plait.verification.difference import Findings
from plait.verification.formats import FIRST_SCALE, Formats, formats_of
from plait.verification.noise import Noise
from plait.verification.place import OF_PARAMETERS, WHOLE, Key, Moment
from plait.verification.recording import Recording
from plait.verification.reference import Batch, Reference
from plait.verification.sharing import from_first_rank, share
from plait.verification.woven import Woven

Recordings = dict[int, Recording]
"""By the micro-batches of the global batch."""


@dataclass(frozen=True)
class Outcome:
    """What one rank found, and where it stands."""

    rank: int
    coordinate: Mapping[str, int]
    paths: tuple[str, ...]
    """Of the model's layers."""
    findings: Findings
    clip: float
    seconds: float


def run_rank(case: Case, plan: Plan, recordings: Recordings | None = None) -> Outcome:
    """Verify `plan` as one of its ranks. Communication: that of training, and the recording from rank 0.

    `recordings` are kept between plans with the same micro-batches, on rank 0.
    """
    begun = perf_counter()
    mesh = Mesh(plan, device=case.device, timeout=case.timeout)
    try:
        with prepared(case) as ready:
            plan = case.recipe.applied_to(plan)
            paths = tuple(layer.path for layer in sequence_of(ready.model).layers)
            findings, clip = _compared(ready, plan, mesh, {} if recordings is None else recordings)
        seconds = perf_counter() - begun
        return Outcome(mesh.rank, dict(mesh.coordinate), paths, findings, clip, seconds)
    finally:
        mesh.close()


def _compared(case: Ready, plan: Plan, mesh: Mesh, recordings: Recordings) -> tuple[Findings, float]:
    formats = formats_of(plan)
    batches = [
        (_placed(inputs, mesh, formats.compute), _placed(targets, mesh, None))
        for inputs, targets in case.batches
    ]
    engine = parallelize(case.model, plan, mesh, case.loss, rules=case.rules, seed=case.recipe.seed)
    sequence = sequence_of(case.model)
    recording = _recorded(case, sequence, engine, formats, batches, recordings)
    woven = Woven(engine, case.recipe, recording, sequence, formats)
    woven.start(case.change)
    for step, batch in enumerate(batches):
        woven.train(step, *batch)
    if case.recipe.mode != "exact":  # after a step in whole numbers, parameters are too large to go on
        woven.overflow(len(batches))
        woven.evaluate(len(batches), *batches[-1])
    return woven.findings, float(recording.values[Moment(0, WHOLE)][Key("clip")])


def _recorded(
    case: Ready,
    sequence: LayerSequence,
    engine: Engine,
    formats: Formats,
    batches: Sequence[Batch],
    recordings: Recordings,
) -> Recording:
    """The recording, made by rank 0: all of it there, elsewhere what the rank's own pieces need.

    Communication: a barrier over the world for each micro-batch, so that no rank waits longer than one takes;
    then see `share`.
    """
    mesh, plan, recipe = engine.mesh, engine.plan, case.recipe
    microbatches = plan.dp * plan.microbatches
    if not from_first_rank(microbatches in recordings, mesh):

        def make(
            noise: Noise, clip: float | None, followed: Recording | None, scale: float | None
        ) -> Reference:
            followed = followed if recipe.follows else None
            given = (sequence, case.loss, recipe, case.change, formats, mesh.device, noise, clip)
            return Reference(*given, followed=followed, scale=scale)

        runs = 1 + recipe.shaken_runs(formats)
        moments = 1 + len(batches) * (microbatches + 1) + 1
        with _in_step(mesh, runs * moments) as tick:
            if mesh.rank == 0:
                recordings[microbatches] = record(make, runs, recipe.clip, batches, microbatches, tick)
    first = mesh.index("dp") * plan.microbatches
    own, held = range(first, first + plan.microbatches), {name for name, _ in engine.named_parameters()}

    def wanted(moment: Moment, key: Key) -> bool:
        parameter = key.name.partition("/")[0] if key.kind in OF_PARAMETERS else None
        return (parameter is None or parameter in held) and (
            moment.microbatch == WHOLE or moment.microbatch in own
        )

    return share(recordings.get(microbatches), mesh, wanted)


@contextmanager
def _in_step(mesh: Mesh, count: int) -> Iterator[Callable[[], None]]:
    """While rank 0 does `count` things, and tells so after each by a call, the others wait for each.

    An error that rank 0 meets is raised on every rank. Communication: a barrier over the world for each.
    """
    left, error = count, None

    def tick() -> None:
        nonlocal left
        left -= 1
        barrier(mesh.group("world"), checked=False).wait()

    try:
        yield tick
    except CommunicationError:  # a rank is gone: each wait for it would take another timeout
        raise
    except PlaitError as met:
        error = met
    while left:
        tick()
    error = from_first_rank(error, mesh)
    if error is not None:
        raise error


MakeReference = Callable[[Noise, float | None, Recording | None, float | None], Reference]
"""Given the noise, the largest gradient norm, what is followed, and the first dynamic loss scale."""


def record(
    make: MakeReference,
    runs: int,
    clip: float | None,
    batches: Sequence[Batch],
    microbatches: int,
    tick: Callable[[], None],
) -> Recording:
    """Run the reference as it is, then shaken; `tick` is called after each moment of each run."""
    recording, scale = Recording(), None
    for number in range(runs):
        reference = make(Noise(number), clip, recording if number else None, scale)
        if number == 0 and reference.updates.scale.dynamic:
            scale = settled_scale(make, clip, batches, microbatches)
            reference = make(Noise(number), clip, None, scale)
        for moment, values in reference.run(batches, microbatches):
            if number == 0:
                recording.add(moment, values)
            else:
                recording.widen(moment, values, reference.epsilon)
            tick()
        clip = reference.clip
        del reference  # before the next is made
    if runs == 1:
        recording.require_exact()
    return recording


def settled_scale(
    make: MakeReference, clip: float | None, batches: Sequence[Batch], microbatches: int
) -> float:
    """Half of the largest dynamic loss scale at which no step overflows.

    A run in fp16 lowers its scale step by step until nothing overflows; a verification starts there, with
    room for rounding. Runs the reference, a few times if need be.
    """
    scale = FIRST_SCALE
    while True:
        reference = make(Noise(0), clip, None, scale)
        try:
            for _ in reference.run(batches, microbatches):
                pass
        except ModelError:
            if scale <= 1 or not reference.updates.overflowed:
                raise
            scale /= 2
        else:
            return scale / 2


def _placed(value: Value, mesh: Mesh, dtype: torch.dtype | None) -> Value:
    return map_tensors(
        lambda tensor: tensor.detach().to(mesh.device, dtype if tensor.is_floating_point() else None), value
    )
