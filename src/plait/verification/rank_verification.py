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
from plait.verification.candidate_run import CandidateRun
from plait.verification.case import Case, PreparedCase, prepared
from plait.verification.findings import Findings
from plait.verification.formats import INITIAL_LOSS_SCALE, NumberFormats, formats_of
from plait.verification.location import OF_PARAMETERS, WHOLE_STEP, RecordKey, RecordScope
from plait.verification.perturbation import Perturbation
from plait.verification.recording_distribution import from_first_rank, share
from plait.verification.reference_recording import ReferenceRecording
from plait.verification.reference_run import Batch, ReferenceRun

RecordingCache = dict[int, ReferenceRecording]
"""By the micro-batches of the global batch."""


@dataclass(frozen=True)
class RankOutcome:
    """What one rank found, and where it stands."""

    rank: int
    coordinate: Mapping[str, int]
    paths: tuple[str, ...]
    """Of the model's layers."""
    findings: Findings
    clip: float
    seconds: float


def verify_rank(case: Case, plan: Plan, recordings: RecordingCache | None = None) -> RankOutcome:
    """Verify `plan` as one of its ranks. Communication: that of training, and the recording from rank 0.

    `recordings` are kept between plans with the same micro-batches, on rank 0.
    """
    begun = perf_counter()
    mesh = Mesh(plan, device=None if case.device == "auto" else case.device, timeout=case.timeout)
    try:
        with prepared(case) as ready:
            plan = case.options.applied_to(plan)
            paths = tuple(layer.path for layer in sequence_of(ready.model).layers)
            findings, clip = _compared(ready, plan, mesh, {} if recordings is None else recordings)
        seconds = perf_counter() - begun
        return RankOutcome(mesh.rank, dict(mesh.coordinate), paths, findings, clip, seconds)
    finally:
        mesh.close()


def _compared(
    case: PreparedCase, plan: Plan, mesh: Mesh, recordings: RecordingCache
) -> tuple[Findings, float]:
    formats = formats_of(plan)
    batches = [
        (_placed(inputs, mesh, formats.compute), _placed(targets, mesh, None))
        for inputs, targets in case.batches
    ]
    engine = parallelize(case.model, plan, mesh, case.loss, rules=case.rules, seed=case.options.seed)
    sequence = sequence_of(case.model)
    recording = _recorded(case, sequence, engine, formats, batches, recordings)
    woven = CandidateRun(engine, case.options, recording, sequence, formats)
    woven.start(case.change)
    for step, batch in enumerate(batches):
        woven.train(step, *batch)
    if case.options.mode != "exact":  # after a step in whole numbers, parameters are too large to go on
        woven.overflow(len(batches))
        woven.evaluate(len(batches), *batches[-1])
    return woven.findings, float(recording.values[RecordScope(0, WHOLE_STEP)][RecordKey("clip")])


def _recorded(
    case: PreparedCase,
    sequence: LayerSequence,
    engine: Engine,
    formats: NumberFormats,
    batches: Sequence[Batch],
    recordings: RecordingCache,
) -> ReferenceRecording:
    """The recording, made by rank 0: all of it there, elsewhere what the rank's own pieces need.

    Communication: a barrier over the world for each micro-batch, so that no rank waits longer than one takes;
    then see `share`.
    """
    mesh, plan, options = engine.mesh, engine.plan, case.options
    microbatches = plan.dp * plan.microbatches
    if not from_first_rank(microbatches in recordings, mesh):

        def make(
            perturbation: Perturbation,
            clip: float | None,
            baseline: ReferenceRecording | None,
            scale: float | None,
        ) -> ReferenceRun:
            baseline = baseline if options.resynchronizes else None
            given = (sequence, case.loss, options, case.change, formats, mesh.device, perturbation, clip)
            return ReferenceRun(*given, baseline=baseline, scale=scale)

        runs = 1 + options.perturbed_runs(formats)
        scopes = 1 + len(batches) * (microbatches + 1) + 1
        with _in_step(mesh, runs * scopes) as tick:
            if mesh.rank == 0:
                recordings[microbatches] = record(make, runs, options.clip, batches, microbatches, tick)
    first = mesh.index("dp") * plan.microbatches
    own, held = range(first, first + plan.microbatches), {name for name, _ in engine.named_parameters()}

    def wanted(scope: RecordScope, key: RecordKey) -> bool:
        parameter = key.name.partition("/")[0] if key.kind in OF_PARAMETERS else None
        return (parameter is None or parameter in held) and (
            scope.microbatch == WHOLE_STEP or scope.microbatch in own
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


MakeReference = Callable[[Perturbation, float | None, ReferenceRecording | None, float | None], ReferenceRun]
"""Given the perturbation, the maximum gradient norm, the baseline, and the first dynamic loss scale."""


def record(
    make: MakeReference,
    runs: int,
    clip: float | None,
    batches: Sequence[Batch],
    microbatches: int,
    tick: Callable[[], None],
) -> ReferenceRecording:
    """Run the reference as it is, then shaken; `tick` is called after each moment of each run."""
    recording, scale = ReferenceRecording(), None
    for number in range(runs):
        reference = make(Perturbation(number), clip, recording if number else None, scale)
        if number == 0 and reference.updates.scale.dynamic:
            scale = settled_scale(make, clip, batches, microbatches)
            reference = make(Perturbation(number), clip, None, scale)
        for scope, values in reference.run(batches, microbatches):
            if number == 0:
                recording.add(scope, values)
            else:
                recording.widen(scope, values, reference.epsilon)
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
    scale = INITIAL_LOSS_SCALE
    while True:
        reference = make(Perturbation(0), clip, None, scale)
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
