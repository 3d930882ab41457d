"""Whether a checkpoint is of the model and optimizer at hand, and what of it holds under their plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from plait.checkpoint.manifest import Manifest
from plait.checkpoint.optimizer_groups import require_same_parameters, require_states_fit
from plait.checkpoint.optimizer_state import require_same_class
from plait.checkpoint.rank_contents import Checkpointable, parameter_key, state_key, state_keys
from plait.errors import CheckpointError, listed
from plait.layout import Layout
from plait.plan import Plan


def require_compatible(
    manifest: Manifest, engine: Checkpointable, optimizer: torch.optim.Optimizer | None
) -> None:
    """CheckpointError unless the checkpoint is of this model, and of such an optimizer."""
    require_model(manifest, engine.layouts, engine.buffer_shapes, engine.aliases)
    if optimizer is not None and manifest.optimizer is None:
        raise CheckpointError(
            "the checkpoint holds no optimizer: give None for it, and it starts anew, or another checkpoint."
        )
    if optimizer is not None and manifest.optimizer is not None:
        require_same_class(optimizer, manifest.optimizer)
        pieces, shapes = dict(engine.named_parameters()), _shapes_of_states(manifest)
        require_same_parameters(optimizer, pieces, manifest.optimizer, shapes)
        require_states_fit(pieces, engine.layouts, shapes)


def _shapes_of_states(manifest: Manifest) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of what the saved optimizer kept, by parameter and key."""
    return {
        name: {key: manifest.tensors[state_key(name, key)].shape for key in keys}
        for name, keys in state_keys(manifest.tensors).items()
    }


def require_model(
    manifest: Manifest,
    layouts: Mapping[str, Layout],
    buffer_shapes: Mapping[str, tuple[int, ...]],
    aliases: Iterable[str],
) -> None:
    """CheckpointError unless the checkpoint is of a model with these parameters and buffers."""
    wanted = {parameter_key(name): layout.shape for name, layout in layouts.items()}
    wanted |= {parameter_key(name): shape for name, shape in buffer_shapes.items()}
    there = {name: one.shape for name, one in manifest.tensors.items() if name.startswith("model.")}
    # What is tied torch writes under all names; plait does not, so here it was not tied.
    again = set() if manifest.run else set(map(parameter_key, aliases))
    kinds = {
        "missing": [name for name in wanted if name not in there],
        "unexpected": [name for name in there if name not in wanted and name not in again],
        "of another shape": [
            f"{name} ({list(there[name])} and not {list(shape)})"
            for name, shape in wanted.items()
            if there.get(name, shape) != shape
        ],
    }
    flaws = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if flaws:
        raise CheckpointError(
            f"the checkpoint is of another model ({'; '.join(flaws).replace('model.', '')}): build the model "
            "that was saved, or give another checkpoint."
        )


def applicable_run_state(plan: Plan, manifest: Manifest) -> dict[str, Any]:
    """What of `manifest.run` holds under `plan`: the order of actions only if it would be asked for alike."""
    wished = {name: getattr(plan, name) for name in ("schedule", "memory_limit")}
    same = all(manifest.plan.get(name, value) == value for name, value in wished.items())
    return {key: value for key, value in manifest.run.items() if same or key != "order"}
