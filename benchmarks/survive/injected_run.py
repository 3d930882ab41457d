"""A small GPT that trains with snapshots while ranks fail; its comparison with a run without failures."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from injections import Injection, Injector
from torch import Tensor, nn

import plait
from plait.checkpoint.checkpoint_manager import CheckpointManager
from plait.checkpoint.folders import all_checkpoints
from plait.engine.resharding.reshard_kept import reshard_kept
from plait.ranks.exchange_with_supervisor import possible_ranks
from plait.ranks.transport.process_ranks import current_ranks

ROWS, CONTEXT, VOCAB = 12, 8, 64
PLANS: Mapping[str, plait.Plan] = {
    "full": plait.Plan(dp=2, strategy="full", precision="fp64"),
    "pipeline": plait.Plan(pp=2, schedule="zb-h1", microbatches=3, precision="fp64"),
    "three": plait.Plan(dp=3, strategy="gradients", precision="fp64"),
    "four": plait.Plan(dp=4, strategy="optimizer", precision="fp64"),
    "stages": plait.Plan(pp=3, microbatches=3, precision="fp64"),
    "tensor": plait.Plan(tp=2, microbatches=2, precision="fp64"),
    "both": plait.Plan(
        pp=2, dp=2, schedule="zb-h1", microbatches=3, strategy="gradients", reduce="each", precision="fp64"
    ),
    "replicas": plait.Plan(pp=2, dp=2, microbatches=3, precision="fp64"),
    "shards": plait.Plan(dp=4, replicate=2, strategy="full", precision="fp64"),
    "all": plait.Plan(tp=2, dp=2, strategy="full", sequence_parallel="keep", precision="fp64"),
}


@dataclass(frozen=True)
class Case:
    """A run: its plan, by number of ranks where these become fewer, its steps, and what happens."""

    plans: tuple[str, ...]
    """Names of plans; that with as many ranks as the world has counts, the first one of several."""
    steps: int = 8
    every: int = 2
    """Steps between snapshots."""
    injections: tuple[Injection, ...] = ()
    on_disk: bool = False
    """Whether checkpoints on disk take the place of snapshots."""
    grows_before: int | None = None
    """The step before which the smallest world waits until there are processes for all ranks."""
    checks: bool = False
    """Whether memory is compared in each step, and before a run moves."""

    @property
    def ranks(self) -> int:
        """The number of ranks at the start."""
        return PLANS[self.plans[0]].world


def model() -> nn.Sequential:
    """A GPT of two blocks, with dropout."""
    made = plait.models.gpt2(layers=2, hidden=16, heads=4, vocab=VOCAB, context=CONTEXT)
    made.blocks.insert(1, plait.Dropout(0.1))
    return made


def tokens_of(step: int) -> Tensor:
    """The batch of a step, `[ROWS, CONTEXT + 1]`."""
    return torch.randint(VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def train(folder: Path, case: Case, injector: Injector | None = None) -> dict[str, Any]:
    """Train on one rank; return the `outcome` of its state. `injector`: of all ranks, where they are threads.

    Every generation of every rank appends to a file of its own: each step, its rows, and its loss.
    """
    if injector is None:
        injector = Injector(folder, case.injections)
        with injector.patched():
            return train(folder, case, injector)
    ranks = current_ranks()
    assert ranks is not None
    fitting = [PLANS[name] for name in case.plans if PLANS[name].world == ranks.size]
    plan, mesh = fitting[0], plait.Mesh(fitting[0], device="cpu", timeout=20.0)
    moved = reshard_kept(model, make_optimizer, plan, mesh, loss=plait.cross_entropy)
    if moved is None:
        engine = plait.parallelize(model(), plan, mesh, loss=plait.cross_entropy)
        optimizer = make_optimizer(engine.parameter_groups())
    else:
        engine, optimizer = moved
    with _kept(folder, case, engine, optimizer) as snapshots:
        found = snapshots.restore()
        first = found.step if found else 0
        _write(folder / f"ready-{mesh.rank}.jsonl", first, mesh.world, moved is not None, time.monotonic())
        with plait.CorruptionChecks(engine, optimizer, memory=case.checks):
            for step in range(first, case.steps):
                if step == case.grows_before and plan == PLANS[case.plans[-1]]:
                    _wait_for_processes(case.ranks)
                injector.begin(step)
                _write(folder / f"samples-{mesh.rank}.jsonl", step, hashes_of(step, *rows_of(mesh)))
                loss = train_step(engine, optimizer, step)
                injector.at("optimizer")
                _write(folder / f"steps-{mesh.rank}.jsonl", step, loss.hex(), time.monotonic())
                snapshots.step(step + 1)
        result = outcome(engine, optimizer)
    injector.begin(case.steps - 1)
    injector.at("end")
    return result


def make_optimizer(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW; its eps keeps small what gradients of noise change."""
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def _wait_for_processes(count: int, most: float = 60.0) -> None:
    """Block until the supervisor has processes for so many ranks, `most` seconds."""
    deadline = time.monotonic() + most
    while possible_ranks() < count:
        assert time.monotonic() < deadline, "no new processes have become ready"
        time.sleep(0.01)


def _kept(folder: Path, case: Case, engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """What keeps the run's state, as `plait.Snapshots` does."""
    if case.on_disk:
        return Checkpoints(folder / "checkpoints", engine, optimizer, case.every)
    return plait.Snapshots(engine, optimizer, every=case.every, name="run", folder=folder)


class Checkpoints:
    """Checkpoints on disk, in place of snapshots."""

    def __init__(self, folder: Path, engine: Any, optimizer: torch.optim.Optimizer, every: int) -> None:
        self._folder, self._engine, self._optimizer, self._every = folder, engine, optimizer, every
        self._manager = CheckpointManager(folder, keep_last=2)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.finish()

    def restore(self) -> Any:
        """Load the newest checkpoint; return its step, or None."""
        for step, path in all_checkpoints(self._folder):
            plait.load(self._engine, self._optimizer, path)
            return SimpleNamespace(step=step)
        return None

    def step(self, number: int) -> None:
        """Save after a multiple of steps."""
        if number % self._every == 0:
            self._manager.save(self._engine, self._optimizer, number, {})


def _write(path: Path, *values: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def train_step(engine: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train on the batch of a step; return its loss."""
    first, last = rows_of(engine.mesh)
    share = tokens_of(step)[first:last]
    loss = engine.forward_backward(share[:, :-1], share[:, 1:]).item()
    engine.step(optimizer, 1.0)
    optimizer.zero_grad()
    return float(loss)


def hashes_of(step: int, first: int, last: int) -> list[str]:
    """A hash of each sample of a part of a step's batch."""
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in tokens_of(step)[first:last]]


def rows_of(mesh: plait.Mesh) -> tuple[int, int]:
    """The rows of each batch that this rank trains on."""
    share = ROWS // mesh.size("dp")
    return share * mesh.index("dp"), share * (mesh.index("dp") + 1)


def outcome(engine: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A hash of this rank's parameters and moments, and on rank 0 the whole parameters."""
    digest = hashlib.sha256()
    for name, parameter in engine.named_parameters():
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
        for key, value in sorted(optimizer.state[parameter].items()):
            digest.update(key.encode() + torch.as_tensor(value).numpy().tobytes())
    whole = {name: value.tolist() for name, value in engine.state_dict().items()}
    return {
        "rank": engine.mesh.rank,
        "ranks": engine.mesh.world,
        "digest": digest.hexdigest(),
        "whole": whole,
    }


def steps_of(folder: Path) -> Iterator[tuple[int, float]]:
    """What the ranks wrote of each step, also of those that were computed twice: its number and its loss."""
    for step, loss, _ in _lines(folder, "steps"):
        yield step, float.fromhex(loss)


def generations_of(folder: Path) -> list[tuple[int, int, bool]]:
    """Of each time that a rank began: the finished steps, the ranks of its world, whether the run moved."""
    return [(step, world, moved) for step, world, moved, _ in _lines(folder, "ready")]


def _lines(folder: Path, name: str) -> Iterator[list[Any]]:
    """What the ranks wrote into files of a name, rank 0 first."""
    for path in sorted(folder.glob(f"{name}-*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


def differences(
    case: Case, folder: Path, results: Sequence[Mapping[str, Any]], undisturbed: Mapping[int, float],
    expected: Sequence[Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    """In what a run differs from the undisturbed one, whose losses by step and results are given; [] if none.

    Where the number of ranks never changed all bits are compared, losses of steps that were computed twice,
    too; else numbers.
    """
    found, seen = [], dict[int, set[str]]()
    is_same = len({world for _, world, _ in generations_of(folder)}) == 1
    for step, samples in _lines(folder, "samples"):
        seen.setdefault(step, set()).update(samples)
    for step, loss in steps_of(folder):
        if loss != undisturbed[step] and (is_same or abs(loss / undisturbed[step] - 1) > 1e-12):
            found.append(f"step {step} has the loss {loss!r}, not {undisturbed[step]!r}")
    unlike = [step for step in range(case.steps) if seen.get(step) != set(hashes_of(step, 0, ROWS))]
    found += [f"step {step} has not seen the samples of its batch, and no others" for step in unlike]
    if is_same:
        pairs = zip(results, expected, strict=True)
        return found + [
            f"rank {a['rank']} ends with other bits" for a, b in pairs if a["digest"] != b["digest"]
        ]
    whole, right = (_tensors(one[0]["whole"]) for one in (results, expected))
    largest = max(float(value.abs().max()) for value in right.values())
    return found + [
        f"{name} differs"
        for name, value in right.items()
        if (whole[name] - value).abs().max() > 1e-12 * max(float(value.abs().max()), 1e-3 * largest)
    ]


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
