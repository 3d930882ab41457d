"""The candidate run, saved and loaded: into a new engine, which takes one more step, and under another plan.

What is loaded under the same plan has to be what was saved, bit by bit; under another one it is compared with
the reference's values, as everything is that the new engine computes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.loading import load_checkpoint
from plait.checkpoint.saving import save
from plait.engine.engine import Engine
from plait.errors import CheckpointError, ModelError, PlanError, ScheduleError
from plait.optimizers.optimizer_makers import optimizer_for
from plait.plan.parameter_units import kind_of
from plait.plan.plan import Plan
from plait.proof.optimizer_proof import Partitioning
from plait.ranks.mesh import Mesh
from plait.verification.candidate.candidate_run import CandidateRun
from plait.verification.candidate.step_comparison import StepComparison
from plait.verification.findings import ComparedBox
from plait.verification.reference.recording import Tolerance, broadcast_object, largest_magnitude
from plait.verification.step_location import Location, StepPhase

MakeEngine = Callable[[Plan, Mesh], Engine]
"""Returns a new engine of the model, with its initial values."""
SavedTensor = tuple[str, Tensor, ComparedBox | None]
"""Name, value, and which part of a parameter it is."""
BYTES_OF_PARAMETER = 32
"""Bytes a parameter that a checkpoint has at most, but for unusual optimizers: four numbers in float64."""


def resumed(candidate: CandidateRun, make_engine: MakeEngine, step: int) -> CandidateRun | None:
    """Save a candidate run, load it under the same and another plan, compare; return the loaded run or None.

    Returns the run of the new engine under the same plan; None where no checkpoint can be written, for the
    reason in `Findings.left_out`. `step`: the number of the step that comes next, in which differences are
    reported. Communication: that of `save`, of two times `load`, and of a mesh.
    """
    findings = candidate.comparison.findings
    with _shared_folder(candidate.engine.mesh) as folder:
        path = folder / "checkpoint"
        findings.left_out = _lacking_space(folder, candidate)
        try:
            if not findings.left_out:
                save(candidate.engine, candidate.optimizer, path)
        except CheckpointError as error:
            findings.left_out = str(error)
        if findings.left_out:
            return None
        run = _loaded(candidate, make_engine, step, path)
        _compare_under_another_plan(candidate.comparison, make_engine, step, path)
    return run


def _loaded(candidate: CandidateRun, make_engine: MakeEngine, step: int, path: Path) -> CandidateRun:
    """Return a run of a new engine and optimizer, into which `path` is loaded; compare it with the old."""
    old = candidate.comparison
    engine = make_engine(candidate.engine.plan, candidate.engine.mesh)
    run = CandidateRun(old.of_engine(engine))
    for _, buffer in engine.named_buffers():  # set to values that show if nothing is loaded
        buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
    first = {name: tensor.detach().clone() for name, tensor, _ in _saved_tensors(run)}
    load_checkpoint(engine, run.optimizer, path, "saved")
    loaded = {name: tensor for name, tensor, _ in _saved_tensors(run)}
    saved = list(_saved_tensors(candidate))
    for name, expected, box in saved:
        location, exactly = (
            Location(step, StepPhase.LOAD, name=name),
            Tolerance(largest_magnitude(expected), 0.0),
        )
        actual = loaded.get(name, torch.zeros_like(expected))
        mistakes = _after_mistakes(name, first, loaded, saved)
        exactly = Tolerance(largest_magnitude(expected), 0.0)
        old.findings.compare(location, actual, expected, exactly, box=box, alternatives=mistakes)
    return run


def _after_mistakes(
    name: str, first: Mapping[str, Tensor], loaded: Mapping[str, Tensor], saved: Sequence[SavedTensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong values of `name` after common mistakes in loading, each after a sentence on it."""
    if name not in loaded:
        nothing = next(torch.zeros_like(tensor) for other, tensor, _ in saved if other == name)
        yield "the loaded optimizer has no such state", nothing
        return
    if name in first:
        yield "it is what a new engine starts with: it was not loaded", first[name]
    for other, tensor, _ in saved:
        if other != name and tensor.shape == loaded[name].shape:
            yield f"it is what was saved of {other}", tensor


def _saved_tensors(run: CandidateRun) -> Iterator[SavedTensor]:
    """Yield a rank's tensors in a checkpoint: parameters, optimizer state, buffers, numbers of the run."""
    for name, tensor in run.updated_tensors():
        parameter = name.rpartition("/")[0] or name
        has_its_shape = tensor.shape == run.comparison.parameters[parameter].shape
        yield name, tensor, run.comparison.box(parameter) if has_its_shape else None
    for name, buffer in run.engine.named_buffers():
        yield name, buffer, None
    state = run.engine.run_state
    for name, number in {"passes": state["passes"], **(state["loss_scale"] or {})}.items():
        yield f"run state {name}", torch.tensor(float(number), dtype=torch.float64), None


def _compare_under_another_plan(old: StepComparison, make_engine: MakeEngine, step: int, path: Path) -> None:
    """Load `path` under a plan whose ranks hold other parts, if any, and compare with the recording."""
    mesh = old.engine.mesh
    plan = another_plan(old.engine.plan, len(old.sequence.layers))
    if plan is None:
        return
    other = Mesh(plan, device=mesh.device, timeout=mesh.timeout)
    try:
        loaded = old.of_engine(make_engine(plan, other))
        groups = loaded.engine.parameter_groups(old.options.weight_decay)
        optimizer = optimizer_for(loaded.engine, old.options.make_optimizer, groups)
        load_checkpoint(loaded.engine, optimizer, path, "saved")
    except (PlanError, ModelError, ScheduleError):
        return  # on every rank: the model or its optimizer does not allow this plan
    finally:
        other.close()
    loaded.compare_state(step, optimizer)


def another_plan(plan: Plan, layers: int) -> Plan | None:
    """Return a plan of as many ranks that hold other shards or layers; None if there is no usual one.

    Data parallelism alone, or if `plan` is that, a stage of the `layers` on each rank.
    """
    kept = (
        *("precision", "master_precision", "gradient_precision", "reduce_precision"),
        *("loss_scale", "linears"),
    )
    formats = {name: getattr(plan, name) for name in kept}
    if plan.world == 1:
        return None
    if plan.dp < plan.world:
        elementwise = Partitioning.of(plan, [kind_of(plan)]).sharded
        return Plan(dp=plan.world, strategy="full" if elementwise else "none", **formats)
    return Plan(pp=plan.world, **formats) if layers >= plan.world else None


def _lacking_space(folder: Path, candidate: CandidateRun) -> str:
    """Return, on all ranks, why the disk may have no room for a checkpoint; "" if it has."""
    mesh = candidate.engine.mesh
    text = ""
    if mesh.rank == 0:
        elements = sum(parameter.numel() for parameter in candidate.comparison.sequence.parameters.values())
        needed, free = BYTES_OF_PARAMETER * elements, shutil.disk_usage(folder).free
        if free < 2 * needed:
            text = f"{folder.parent} has {free / 1e9:.1f} GB free, for a checkpoint of {needed / 1e9:.1f} GB"
    return broadcast_object(text, mesh)


@contextmanager
def _shared_folder(mesh: Mesh) -> Iterator[Path]:
    """Context: yield a new folder, the same on all ranks, which is removed at exit."""
    path = Path(broadcast_object(tempfile.mkdtemp(prefix="plait-verify-") if mesh.rank == 0 else "", mesh))
    try:
        yield path
    finally:
        if mesh.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
