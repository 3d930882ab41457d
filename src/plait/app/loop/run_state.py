"""The state of a training run besides its tensors, which checkpoints and snapshots hold; resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.app.data.batches import description
from plait.app.loop.stream import RankStream
from plait.app.loop.training_loop import TrainingLoop
from plait.checkpoint.loading import Loaded
from plait.checkpoint.manifest import section
from plait.checkpoint.optimizer_options import option_line
from plait.errors import CheckpointError, DataError, listed

OWN_KEYS = ("step", "batches", "callbacks", "position")
"""Keys of `run_state` that say where a run stands."""
Check = Callable[[Mapping[str, Any], Path], None]
"""Raises an error where a run cannot go on from a saved state, given also where that was found."""


def run_state(run: TrainingLoop, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what checkpoints hold beside tensors: step, batches, callbacks' states, `more`; as JSON."""
    callbacks = {name: dict(callback.state_dict()) for name, callback in run.named_callbacks()}
    return {
        "step": run.done,
        "batches": description(run.batches),
        "callbacks": {name: values for name, values in callbacks.items() if values},
        **({"position": run.batches.state_dict()} if isinstance(run.batches, RankStream) else {}),
        **more,
    }


def resume_from(run: TrainingLoop, loaded: Loaded, source: Path, check: Check, start_over: str) -> None:
    """Let a run go on from the state that was loaded from `source`; set `run.done` to its finished steps.

    `start_over`: how to begin anew, for errors. Raises `CheckpointError` for a state without a number of
    steps, `DataError` where the batches are others, and the errors of `check`.
    """
    state = loaded.state
    step = state.get("step")
    if type(step) is not int or step < 0:
        raise CheckpointError(
            f"the state of the checkpoint {source} has no number of steps: give one of plait train, "
            "or of save with a state of {'step': …}."
        )
    check(state, source)
    _require_same_batches(section(state, "batches"), run, source, start_over)
    _load_position(state, run, source, start_over)
    _load_callbacks(state, run, source)
    run.done = step


def tell_differences(run: TrainingLoop, loaded: Loaded) -> None:
    """Print the optimizer's options and the precision in which the loaded state differs from the run."""
    # A rate that the run sets in each step is none of the optimizer's settings.
    options = {key: both for key, both in loaded.options.items() if key != "lr" or not run.sets_rate}
    if options:
        run.tell(option_line(options, "given"))
    if loaded.precision:
        run.tell(loaded.precision)


def _require_same_batches(
    before: Mapping[str, Any], run: TrainingLoop, source: Path, start_over: str
) -> None:
    """Raise `DataError` unless the batches continue those of the checkpoint with the same samples."""
    now = description(run.batches)
    for name in now:
        if name in before and before[name] != now[name]:
            raise DataError(
                f"the batches have {name} = {now[name]}, and had {before[name]} when {source} was written: "
                f"give the same batches, or start over with {start_over}."
            )


def _load_position(state: Mapping[str, Any], run: TrainingLoop, source: Path, start_over: str) -> None:
    """Let a stream go on from its position. Raises `DataError` for one where the other has none."""
    if isinstance(run.batches, RankStream):
        run.batches.load_state_dict(section(state, "position"))
    elif "position" in state:
        raise DataError(
            f"{source} holds the position of a plait.Stream, and the batches are an object of "
            f"{type(run.batches).__name__}: give the stream, or start over with {start_over}."
        )


def _load_callbacks(state: Mapping[str, Any], run: TrainingLoop, source: Path) -> None:
    """Load the state of each callback; say which state there is no callback for."""
    saved = dict(section(state, "callbacks"))
    for name, callback in run.named_callbacks():
        if found := saved.pop(name, None):
            callback.load_state_dict(found)
    if saved:
        run.tell(
            f"WARNING: {source} holds the state of {listed(sorted(saved))}, and the run has no such "
            "callback: it is left out."
        )
