"""The training loop: `plait.fit`, its callbacks, loggers, checkpoints and learning-rate schedules."""

from typing import Any

from plait.loop.callbacks import History, Log, ReplicaChecks
from plait.loop.checkpoints import Checkpoints
from plait.loop.early_stop import EarlyStop
from plait.loop.learning_rates import (
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from plait.loop.loggers import Csv, JsonLines
from plait.loop.parameter_rates import ParameterRate, freeze, parameter_groups
from plait.loop.progress import Progress
from plait.loop.report_files import Report
from plait.loop.tracking_services import MLflow, TensorBoard, WeightsAndBiases
from plait.loop.training import Callback, TrainingLoop
from plait.loop.validation import Validation
from plait.submodules import submodule

__all__ = [
    "Callback",
    "Checkpoints",
    "Csv",
    "EarlyStop",
    "History",
    "JsonLines",
    "Log",
    "MLflow",
    "ParameterRate",
    "Progress",
    "ReplicaChecks",
    "Report",
    "TensorBoard",
    "TrainingLoop",
    "Validation",
    "WeightsAndBiases",
    "freeze",
    "parameter_groups",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
