"""Checks that a checkpoint fits the model, the optimizer and the plan that load it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plait.checkpoint.manifest import Manifest
from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.optimizer_state import NOT_RESTORED, NOT_SAVED, layout_of_state
from plait.checkpoint.rank_contents import Checkpointable, parameter_key, state_key, state_keys
from plait.errors import CheckpointError, listed
from plait.plan.layout.layout import Layout
from plait.plan.plan import Plan
from plait.tensor.float8.recipes import RECIPES

_OF_SCHEDULERS = frozenset({"initial_lr"})
"""Options that learning-rate schedulers add to groups."""
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of saved optimizer state, by parameter and key."""
Sources = Sequence[tuple[dict[str, Any], dict[str, str]]]
"""Of each group of this rank's optimizer: its options, and the saved groups of its parameters, by number (as
text, for JSON), each with the name of one of these parameters."""


def require_compatible(manifest: Manifest, engine: Checkpointable, optimizers: OptimizerSet | None) -> None:
    """Raise CheckpointError unless model and optimizers match those that the checkpoint was saved from."""
    require_model(manifest, engine.shard_plan.shapes, engine.shard_plan.aliases)
    if optimizers is None:
        return
    if manifest.optimizer is None:
        raise CheckpointError(
            "the checkpoint holds no optimizer: give None for it, and it starts anew, or another checkpoint."
        )
    require_same_class(optimizers, manifest.optimizer)
    shards = dict(engine.named_parameters())
    shapes = {
        name: {key: manifest.tensors[state_key(name, key)].shape for key in keys}
        for name, keys in state_keys(manifest.tensors).items()
    }
    _require_same_parameters(optimizers, shards, manifest.optimizer, shapes)
    sharded = {name: shard for name, shard in shards.items() if optimizers.state_rank(shard) is None}
    _require_states_shardable(sharded, engine.shard_plan.layouts, shapes)


def require_model(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], aliases: Iterable[str]) -> None:
    """Raise CheckpointError unless the saved parameters and buffers have exactly these names and `shapes`."""
    saved = {name: one.shape for name, one in manifest.parameters.items()}
    # An imported checkpoint has tied parameters under all names, as torch saves them; one of plait does not.
    ignored = set() if manifest.run else set(aliases)
    kinds = {
        "missing": [name for name in shapes if name not in saved],
        "unexpected": [name for name in saved if name not in shapes and name not in ignored],
        "of another shape": [
            f"{name} ({list(saved[name])} and not {list(shape)})"
            for name, shape in shapes.items()
            if saved.get(name, shape) != shape
        ],
    }
    errors = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)
    if errors:
        raise CheckpointError(
            f"the checkpoint is of another model ({errors}): give the model that was saved, or another "
            "checkpoint."
        )


def precision_change(manifest: Manifest, shards: Mapping[str, nn.Parameter]) -> str:
    """Return a sentence about parameters that were updated in another precision when saved; "" if none.

    `shards`: this rank's parameters, as the optimizer updates them. Imported checkpoints, which record no run
    of plait, say nothing of the precision in which they were trained.
    """
    if not manifest.run:
        return ""
    saved = {name: manifest.tensors[parameter_key(name)].torch_dtype for name in shards}
    changed = [name for name, one in shards.items() if one.requires_grad and one.dtype != saved[name]]
    if not changed:
        return ""
    before, now = (str(one).removeprefix("torch.") for one in (saved[changed[0]], shards[changed[0]].dtype))
    return (
        f"the checkpoint holds {listed(changed, most=2)} as updated in {before}, and the optimizer goes on "
        f"in {now}: plan.master_precision decides (by default fp32 for bf16, which was updated in bf16 once)."
    )


def linears_change(before: Mapping[str, Any], plan: Plan) -> str:
    """Return a sentence where `plan` casts linears to float8 otherwise than the plan `before`; "" if not."""
    was, now = before.get("linears"), plan.linears
    if not before or (was is None and now is None):
        return ""
    if was != now:
        return (
            f"linears have multiplied in {was or 'the precision'}, and multiply in {now or 'the precision'} "
            "from now on, so numbers change: plan.linears decides."
        )
    counts = before.get("dp", 1) * before.get("microbatches", 1), plan.dp * plan.microbatches
    if counts[0] == counts[1] or (now is not None and RECIPES[now].scales_rows_alone):
        return ""
    return (
        f"steps have had {counts[0]} micro-batches, and have {counts[1]} from now on, each with "
        "float8 scales of its own, so numbers change: plan.dp · plan.microbatches decides."
    )


def applicable_run_state(plan: Plan, manifest: Manifest) -> dict[str, Any]:
    """Return the saved `Engine.run_state`, less its order of actions if `plan` changes what it depends on.

    It depends on the schedule and the memory limit.
    """
    return applicable_order(manifest.run, manifest.plan, plan)


def applicable_order(run: Mapping[str, Any], before: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a run's state, less its order of actions if schedule or memory limit differ from `before`.

    `before`: the plan of that run, as a dictionary.
    """
    wanted = {name: getattr(plan, name) for name in ("schedule", "memory_limit")}
    same = all(before.get(name, value) == value for name, value in wanted.items())
    return {key: value for key, value in run.items() if same or key != "order"}


def require_same_class(optimizers: OptimizerSet, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the saved optimizers are of other classes than `optimizers`.

    Imported checkpoints have the class "": then the names of options are compared, if there are any.
    """
    kind = optimizers.kind
    if not saved["class"]:
        options = {key for group in saved["groups"] for key in group} - NOT_RESTORED - _OF_SCHEDULERS
        wanted = optimizers.defaults - NOT_RESTORED
        if options - wanted and wanted - options:  # versions of torch differ in one direction only
            raise CheckpointError(
                f"the checkpoint holds the state of an optimizer with {', '.join(sorted(options))}, which "
                f"{kind} is not: give one of the class that was saved, or in Python None for one that starts "
                "anew."
            )
    elif kind != saved["class"]:
        several = ", several in a list" if "+" in kind + saved["class"] else ""
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['class']}, and the optimizer is {kind}: give one of "
            f"the same class{several}, or in Python None for an optimizer that starts anew."
        )


def _require_same_parameters(
    optimizers: OptimizerSet,
    shards: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
    with_state: Iterable[str],
) -> None:
    """Raise CheckpointError unless the optimizer and the saved one have the same trainable parameters."""
    names = {id(shard): name for name, shard in shards.items()}
    optimizers.require_own_parameters(names)
    for name, kind in optimizers.members_of(names).items():
        before = saved.get("class_of", {}).get(name, kind)
        if before != kind:
            raise CheckpointError(
                f"the checkpoint holds {name} as a parameter of {before}, and {kind} has it now: give each "
                "optimizer the parameters that it had."
            )
    given = {id(one) for group in optimizers.param_groups for one in group["params"]}
    trainable = {name: id(shard) in given for name, shard in shards.items() if shard.requires_grad}
    had = {*saved["group_of"], *saved["plain"], *with_state}
    left_out = [name for name, is_given in trainable.items() if name in had and not is_given]
    if left_out:
        raise CheckpointError(
            f"the checkpoint's optimizer had {listed(left_out)}, and the optimizer has not: give one of the "
            "same parameters, or None for an optimizer that starts anew."
        )
    added = [name for name, is_given in trainable.items() if is_given and name not in had]
    if added and saved["group_of"]:
        raise CheckpointError(
            f"the optimizer has {listed(added)}, and the checkpoint's had not: give one of the same "
            "parameters, or None for an optimizer that starts anew."
        )


def _require_states_shardable(
    shards: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout], shapes: Shapes
) -> None:
    """Raise CheckpointError if saved state of a sharded parameter is neither scalar nor of its full shape."""
    for name, shard in shards.items():
        layout = layouts[name]
        for key, shape in shapes.get(name, {}).items():
            sharded = layout_of_state(key, shape, layout) is layout
            if shape and not sharded and tuple(shard.shape) != layout.shape:
                raise CheckpointError(
                    f"the optimizer kept {key} of {name} as {list(shape)}, which cannot be sharded as the "
                    "parameter is here: load it where parameters are whole (strategy none, tp 1)."
                )


def group_sources(optimizers: OptimizerSet, names: Mapping[int, str], saved: Mapping[str, Any]) -> Sources:
    """Return each parameter group's options, and the saved groups in which its parameters were."""
    found = []
    for group in optimizers.param_groups:
        sources: dict[str, str] = {}
        for name in (names[id(one)] for one in group["params"]):
            if name in saved["group_of"]:
                sources.setdefault(str(saved["group_of"][name]), name)
        options = {key: value for key, value in group.items() if key not in NOT_SAVED | NOT_RESTORED}
        found.append((json.loads(json.dumps(options, default=_as_json)), sources))
    return found


def require_same_groups(ranks: Iterable[Sources], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError where parameter groups with different options were merged or split since saving.

    `ranks`: the `group_sources` of each rank.
    """
    options_now: dict[str, tuple[dict[str, Any], str]] = {}
    for groups in ranks:
        for number, (options, sources) in enumerate(groups):
            first = next(iter(sources), "")
            for other in sources:
                apart = _difference(saved["groups"][int(first)], saved["groups"][int(other)])
                if apart:
                    raise CheckpointError(
                        f"group {number} of the optimizer has {sources[first]} and {sources[other]}, which "
                        f"were in different groups when the checkpoint was written ({apart}): group "
                        "parameters as then."
                    )
            for source, name in sources.items():
                known, example = options_now.setdefault(source, (options, name))
                apart = _difference(known, options)
                if apart:
                    raise CheckpointError(
                        f"the optimizer has {example} and {name} in different groups ({apart}), which were "
                        "in one when the checkpoint was written: group parameters as then, or give both "
                        "groups the same options."
                    )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return as text the first option in which two parameter groups differ, with both values; "" if none."""
    for key in one:
        if key in other and key not in NOT_RESTORED and one[key] != other[key]:
            return f"{key} {one[key]} and {other[key]}"
    return ""


def _as_json(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
