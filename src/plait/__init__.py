"""plait: 3D-parallel training for PyTorch: tensor, pipeline and sharded data parallelism for ordinary models.

The public names, and modules such as `plait.loop`, are imported on first use, so that `import plait` is fast,
and schedules work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.submodules import submodule
from plait.version import VERSION

if TYPE_CHECKING:
    from plait import (
        calibration as calibration,
    )
    from plait import (
        checkpoint as checkpoint,
    )
    from plait import (
        comm as comm,
    )
    from plait import (
        data as data,
    )
    from plait import (
        engine as engine,
    )
    from plait import (
        errors as errors,
    )
    from plait import (
        layers as layers,
    )
    from plait import (
        layout as layout,
    )
    from plait import (
        loop as loop,
    )
    from plait import (
        models as models,
    )
    from plait import (
        prediction as prediction,
    )
    from plait import (
        rules as rules,
    )
    from plait import (
        schedules as schedules,
    )
    from plait import (
        tensor as tensor,
    )
    from plait import (
        verification as verification,
    )
    from plait.autograd.dropout import Dropout
    from plait.autograd.running_sequence import positions
    from plait.checkpoint.loading import load
    from plait.checkpoint.saving import save
    from plait.comm.launch import launch
    from plait.comm.mesh import Mesh
    from plait.composer import parallelize
    from plait.context_attention.attention import attention
    from plait.data.loader import Loader
    from plait.engine.local_batch import sequence_part
    from plait.errors import PlaitError
    from plait.footprint.estimate import memory
    from plait.loop.fit import fit
    from plait.loop.stream import Stream
    from plait.models.low_rank_adaptation import lora
    from plait.pictures.timelines.timeline import simulate
    from plait.plan import Plan
    from plait.prediction.hardware import Hardware
    from plait.prediction.plan_search import plans
    from plait.prediction.step_prediction import predict
    from plait.schedules.check import check
    from plait.schedules.costs import Costs
    from plait.schedules.search.api import schedule
    from plait.tensor.losses import cross_entropy
    from plait.tensor.preferences import dpo_loss
    from plait.verification.verify import verify

__version__ = VERSION

_HOME = {
    "Costs": "plait.schedules.costs",
    "Dropout": "plait.autograd.dropout",
    "Hardware": "plait.prediction.hardware",
    "Loader": "plait.data.loader",
    "Mesh": "plait.comm.mesh",
    "Plan": "plait.plan",
    "PlaitError": "plait.errors",
    "Stream": "plait.loop.stream",
    "attention": "plait.context_attention.attention",
    "check": "plait.schedules.check",
    "cross_entropy": "plait.tensor.losses",
    "dpo_loss": "plait.tensor.preferences",
    "fit": "plait.loop.fit",
    "launch": "plait.comm.launch",
    "load": "plait.checkpoint.loading",
    "lora": "plait.models.low_rank_adaptation",
    "memory": "plait.footprint.estimate",
    "parallelize": "plait.composer",
    "plans": "plait.prediction.plan_search",
    "positions": "plait.autograd.running_sequence",
    "predict": "plait.prediction.step_prediction",
    "save": "plait.checkpoint.saving",
    "schedule": "plait.schedules.search.api",
    "sequence_part": "plait.engine.local_batch",
    "simulate": "plait.pictures.timelines.timeline",
    "verify": "plait.verification.verify",
}

__all__ = [
    "Costs",
    "Dropout",
    "Hardware",
    "Loader",
    "Mesh",
    "PlaitError",
    "Plan",
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
