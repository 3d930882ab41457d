"""plait: 3D-parallel training for PyTorch: tensor, pipeline and sharded data parallelism for ordinary models.

The public names, and modules such as `plait.loop`, are imported on first use, so that `import plait` is fast,
and schedules work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.package import VERSION, submodule

if TYPE_CHECKING:
    from plait import app as app
    from plait import checkpoint as checkpoint
    from plait import engine as engine
    from plait import errors as errors
    from plait import estimate as estimate
    from plait import loop as loop
    from plait import models as models
    from plait import optimizers as optimizers
    from plait import pictures as pictures
    from plait import plan as plan
    from plait import ranks as ranks
    from plait import rules as rules
    from plait import schedules as schedules
    from plait import tensor as tensor
    from plait import verification as verification
    from plait.app.data.loader import Loader
    from plait.app.loop.fit import fit
    from plait.app.loop.stream import Stream
    from plait.checkpoint.loading import load
    from plait.checkpoint.saving import save
    from plait.checkpoint.snapshots.snapshots import Snapshots
    from plait.engine.corruption.corruption_checks import CorruptionChecks
    from plait.engine.local_batch import sequence_part
    from plait.engine.parallelize import parallelize
    from plait.engine.resharding.reshard import reshard
    from plait.engine.resharding.reshard_kept import reshard_kept
    from plait.errors import PlaitError
    from plait.estimate.memory.predict_memory import memory
    from plait.estimate.prediction.prediction import predict
    from plait.estimate.search.plan_search import plans
    from plait.estimate.time.hardware import Hardware
    from plait.models.lora import lora
    from plait.optimizers.muon import Muon
    from plait.optimizers.owned_optimizer import Owned
    from plait.pictures.timelines.timeline import simulate
    from plait.plan.plan import Plan
    from plait.ranks.launch.launch import launch
    from plait.ranks.mesh import Mesh
    from plait.schedules.check import check
    from plait.schedules.costs import Costs
    from plait.schedules.search.schedule_by_policy import schedule
    from plait.tensor.attention.attention import attention
    from plait.tensor.direct_preference import dpo_loss
    from plait.tensor.dropout import Dropout
    from plait.tensor.experts.mixture import MixtureOfExperts
    from plait.tensor.losses import cross_entropy
    from plait.tensor.running_sequence import positions
    from plait.verification.verify import verify

__version__ = VERSION

_HOME = {
    "CorruptionChecks": "plait.engine.corruption.corruption_checks",
    "Costs": "plait.schedules.costs",
    "Dropout": "plait.tensor.dropout",
    "Hardware": "plait.estimate.time.hardware",
    "Loader": "plait.app.data.loader",
    "Mesh": "plait.ranks.mesh",
    "MixtureOfExperts": "plait.tensor.experts.mixture",
    "Muon": "plait.optimizers.muon",
    "Owned": "plait.optimizers.owned_optimizer",
    "Plan": "plait.plan.plan",
    "PlaitError": "plait.errors",
    "Snapshots": "plait.checkpoint.snapshots.snapshots",
    "Stream": "plait.app.loop.stream",
    "attention": "plait.tensor.attention.attention",
    "check": "plait.schedules.check",
    "cross_entropy": "plait.tensor.losses",
    "dpo_loss": "plait.tensor.direct_preference",
    "fit": "plait.app.loop.fit",
    "launch": "plait.ranks.launch.launch",
    "load": "plait.checkpoint.loading",
    "lora": "plait.models.lora",
    "memory": "plait.estimate.memory.predict_memory",
    "parallelize": "plait.engine.parallelize",
    "plans": "plait.estimate.search.plan_search",
    "positions": "plait.tensor.running_sequence",
    "predict": "plait.estimate.prediction.prediction",
    "reshard": "plait.engine.resharding.reshard",
    "reshard_kept": "plait.engine.resharding.reshard_kept",
    "save": "plait.checkpoint.saving",
    "schedule": "plait.schedules.search.schedule_by_policy",
    "sequence_part": "plait.engine.local_batch",
    "simulate": "plait.pictures.timelines.timeline",
    "verify": "plait.verification.verify",
}

__all__ = [
    "CorruptionChecks",
    "Costs",
    "Dropout",
    "Hardware",
    "Loader",
    "Mesh",
    "MixtureOfExperts",
    "Muon",
    "Owned",
    "PlaitError",
    "Plan",
    "Snapshots",
    "Stream",
    "attention",
    "check",
    "cross_entropy",
    "dpo_loss",
    "fit",
    "launch",
    "load",
    "lora",
    "memory",
    "models",
    "parallelize",
    "plans",
    "positions",
    "predict",
    "reshard",
    "reshard_kept",
    "save",
    "schedule",
    "sequence_part",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    return submodule("plait", name)


def __dir__() -> list[str]:
    return sorted(__all__)
