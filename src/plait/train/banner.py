"""The lines that a run prints before its first step: model, plan, data and folder."""

from __future__ import annotations

from collections.abc import Iterator

from plait.comm.mesh import Mesh
from plait.plan import Plan
from plait.train.config import Config
from plait.train.data import Data


def banner(
    config: Config, mesh: Mesh, data: Data, parameters: int, *, has_weights: bool = False
) -> Iterator[str]:
    """Yield the banner's lines; `parameters`: the number of parameters of the whole model.

    `has_weights`: whether the folder of a Hugging Face model holds weights to start from.
    """
    model, settings, plan = config.model, config.train, config.plan()
    size = f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters:,}"
    yield (
        f"Model: {model.name}, {size} parameters ({model.layers} blocks, hidden {model.hidden}, "
        f"context {model.context}, vocabulary {data.vocab:,})."
    )
    if model.folder is not None and has_weights:
        yield f"Weights: those in {model.folder}."
    elif model.folder is not None:
        yield (
            f"WARNING: {model.folder} holds no weights: the run starts from random values (train.seed = "
            f"{settings.seed})."
        )
    ranks = f"{plan.world} ranks" if plan.world > 1 else "1 rank"
    yield (
        f"Plan: {ranks} on {mesh.device.type} (pp {plan.pp} × dp {plan.dp} × tp {plan.tp}{_sharding(plan)}), "
        f"schedule {plan.schedule}, {settings.batch} sequences a step in {plan.dp} × {plan.microbatches} "
        "micro-batches."
    )
    yield f"Data: {data.summary}."
    yield f"Run: {config.run.dir}"


def _sharding(plan: Plan) -> str:
    """Return what is sharded over `dp` and what is offloaded to the CPU, as text, or ""."""
    if not plan.shards:
        return ""
    copies = f" in {plan.replicate} copies" if plan.replicate > 1 else ""
    offload = f", offload {plan.offload}" if plan.offload != "none" else ""
    return f", strategy {plan.strategy}{copies}, reduced {plan.reduce}{offload}"
