"""Verification on one rank: the reference run (on rank 0), then the candidate run compared with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from plait.engine.engine import Engine
from plait.engine.parallelize import parallelize
from plait.errors import CommunicationError, ModelError, PlaitError
from plait.models.layers.layer_sequence import LayerSequence, sequence_of
from plait.plan.plan import Plan
from plait.ranks.collectives import barrier
from plait.ranks.mesh import Mesh
from plait.tensor.chunked_cross_entropy import output_linear_name
from plait.tensor.experts.router import Router
from plait.tensor.nested_values import Value, map_tensors
from plait.verification.candidate.candidate_run import CandidateRun
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.case import Case, prepared
from plait.verification.expected_dtypes import INITIAL_LOSS_SCALE, NumberFormats, formats_of
from plait.verification.findings import Findings
from plait.verification.reference.recording import ReferenceRecording, broadcast_object, distribute_recording
from plait.verification.reference.reference_run import Batch, ReferenceRun
from plait.verification.reference.rounding_errors import Perturbation
from plait.verification.resumed_run import resumed
from plait.verification.step_batches import batches_of_steps
from plait.verification.step_location import PARAMETER_KINDS, SCALE, WHOLE_STEP, RecordKey, RecordScope

RecordingCache = dict[tuple[int, str | None, str | None], ReferenceRecording]
"""Recordings by the number of micro-batches of the global batch, by the linear whose input is recorded as
the last layer's output (None: none), and by the recipe of linears in float8; empty on other ranks than 0."""
MakeReference = Callable[..., ReferenceRun]
"""`ReferenceRun` with all arguments but `perturbation`, `clip`, `baseline` and `scale`."""


@dataclass(frozen=True)
class RankOutcome:
    """The findings of one rank, and the rank's coordinate in the mesh."""

    rank: int
    coordinate: Mapping[str, int]
    paths: tuple[str, ...]
    """Path of each layer of the model."""
    findings: Findings
    clip: float
    seconds: float


def verify_rank(case: Case, plan: Plan, recordings: RecordingCache | None = None) -> RankOutcome:
    """Verify `plan` on this rank. Communication: that of the training, and rank 0's recording to all.

    `recordings` are kept on rank 0, for further plans with the same micro-batches.
    """
    begun = perf_counter()
    with closing(case.mesh(plan)) as mesh, prepared(case) as ready:
        plan = case.options.applied_to(plan)
        paths = tuple(layer.path for layer in sequence_of(ready.build()).layers)
        findings, clip = _compared(ready, plan, mesh, {} if recordings is None else recordings)
        seconds = perf_counter() - begun
        return RankOutcome(mesh.rank, dict(mesh.coordinate), paths, findings, clip, seconds)


def _compared(case: Case, plan: Plan, mesh: Mesh, recordings: RecordingCache) -> tuple[Findings, float]:
    """Run the reference, then the parallel run; return the findings and the maximum gradient norm."""
    formats = formats_of(plan)
    given = list(case.batches)
    if case.options.resumed_steps:
        given.append(batches_of_steps(*given[-1], 2, plan.dp * plan.microbatches)[-1])
    batches = [
        (_on_device(inputs, mesh, formats.compute), _on_device(targets, mesh, None))
        for inputs, targets in given
    ]
    model = case.build()
    if any(module.balance.forced_routing for module in model.modules() if isinstance(module, Router)):
        raise ModelError(
            "verify compares the experts that routers choose, and those of this model have forced_routing: "
            "leave it out of balance_experts (train.forced_routing)."
        )

    def make_engine(plan: Plan, mesh: Mesh) -> Engine:
        return parallelize(model, plan, mesh, case.loss, rules=case.rules, seed=case.options.seed)

    engine = make_engine(plan, mesh)
    sequence = sequence_of(model)
    recording = _recorded(case, sequence, engine, formats, batches, recordings)
    comparison = StepComparison(engine, case.options, recording, sequence, formats)
    candidate = CandidateRun(comparison)
    candidate.start(case.change)
    last = len(batches) - case.options.resumed_steps
    for step, batch in enumerate(batches[:last]):
        candidate.train(step, *batch)
    if case.options.mode == "exact":  # after a step in whole numbers, parameters are too large to go on
        return comparison.findings, recording.number(0, "clip")
    if batches[last:] and (run := resumed(candidate, make_engine, last)) is not None:
        run.train(last, *batches[last])
    candidate.overflow(last)
    candidate.evaluate(last, *batches[last - 1])
    return comparison.findings, recording.number(0, "clip")


def _recorded(
    case: Case,
    sequence: LayerSequence,
    engine: Engine,
    formats: NumberFormats,
    batches: Sequence[Batch],
    recordings: RecordingCache,
) -> ReferenceRecording:
    """Return rank 0's recording of the reference; on other ranks only the parts that they compare.

    Communication: a barrier over the world for each scope of each run, so that no rank waits longer than for
    one; then that of `distribute_recording`.
    """
    mesh, plan, options = engine.mesh, engine.plan, case.options
    microbatches, linear = plan.dp * plan.microbatches, None
    if plan.loss_rows is not None:
        linear = output_linear_name(sequence.layers[-1], {}, plan.loss_rows)
    kept = microbatches, linear, plan.linears
    if not broadcast_object(kept in recordings, mesh):
        arguments = sequence, case.loss, options, case.change, formats, mesh.device
        make = partial(ReferenceRun, *arguments, output_linear=linear, rules=case.rules, linears=plan.linears)
        runs = 1 + options.perturbed_runs(formats)
        scopes = 1 + (len(batches) + 1) * (microbatches + 1)  # initial values, steps and the evaluation
        with _barrier_per_scope(mesh, runs * scopes) as tick:
            if mesh.rank == 0:
                recordings[kept] = record(make, runs, options.clip, batches, microbatches, tick)
    first = mesh.index("dp") * plan.microbatches
    own = (WHOLE_STEP, *range(first, first + plan.microbatches))
    held = {name for name, _ in engine.named_parameters()}
    divided = {name for name, layout in engine.layouts.items() if "ep" in layout.axes}
    loaded = RecordScope(len(batches) - 2) if options.resumed_steps else None

    def wanted(scope: RecordScope, key: RecordKey) -> bool:
        if scope == loaded and key.kind in ("value", "state"):
            return True  # under another plan this rank loads other parts
        is_held = key.kind not in PARAMETER_KINDS or key.name.partition("/")[0] in held
        # Tokens of all data-parallel ranks reach divided experts. Scales of others show what was reduced.
        everywhere = key.kind == SCALE or (key.kind == "contribution" and key.name in divided)
        return is_held and (everywhere or scope.microbatch in own)

    return distribute_recording(recordings.get(kept), mesh, wanted)


@contextmanager
def _barrier_per_scope(mesh: Mesh, count: int) -> Iterator[Callable[[], None]]:
    """Yield a barrier that rank 0 calls after each scope; at exit, each rank makes the rest of `count` calls.

    Raises an error of rank 0 on every rank. Communication: a barrier over the world for each call.
    """
    left, error = count, None

    def tick() -> None:
        nonlocal left
        left -= 1
        barrier(mesh.group("world"), checked=False).wait()

    try:
        yield tick
    except CommunicationError:  # a rank is lost: each further barrier would take another timeout
        raise
    except PlaitError as raised:
        error = raised
    while left:
        tick()
    error = broadcast_object(error, mesh)
    if error is not None:
        raise error


def record(
    make: MakeReference,
    runs: int,
    clip: float | None,
    batches: Sequence[Batch],
    microbatches: int,
    tick: Callable[[], None],
) -> ReferenceRecording:
    """Return a reference run's recording, with tolerances from `runs - 1` runs with added rounding errors.

    `tick` is called after each micro-batch and step.
    """
    recording, scale = ReferenceRecording(), None
    for number in range(runs):
        baseline = recording if number else None
        reference = make(Perturbation(number), clip, baseline=baseline, scale=scale)
        if number == 0 and reference.update.scale.dynamic:
            scale = settled_scale(make, clip, batches, microbatches)
            reference = make(Perturbation(number), clip, scale=scale)
        for scope, values in reference.run(batches, microbatches):
            if number == 0:
                recording.add(scope, values)
            else:
                recording.widen(scope, values, reference.epsilon)
            tick()
        clip, recording.narrowing = reference.update.clip, recording.narrowing or reference.casts.found
        del reference  # frees its memory before the next run is made
    if runs == 1:
        recording.require_exact()
    return recording


def settled_scale(
    make: MakeReference, clip: float | None, batches: Sequence[Batch], microbatches: int
) -> float:
    """Return a dynamic loss scale that no step of the reference overflows, with a margin of 2.

    Training in fp16 halves its scale until nothing overflows; a verification starts there, with a factor of 2
    as a margin for rounding. Runs the reference once per halving.
    """
    scale = INITIAL_LOSS_SCALE
    while True:
        reference = make(Perturbation(0), clip, scale=scale)
        try:
            for _ in reference.run(batches, microbatches):
                pass
        except ModelError:
            if scale <= 1 or not reference.update.overflowed:
                raise
            scale /= 2
        else:
            return scale / 2


def _on_device(value: Value, mesh: Mesh, dtype: torch.dtype | None) -> Value:
    return map_tensors(
        lambda tensor: tensor.detach().to(mesh.device, dtype if tensor.is_floating_point() else None), value
    )
