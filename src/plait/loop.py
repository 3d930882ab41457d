"""Public names of the training loop, which `plait.app.loop` defines: callbacks, loggers, learning rates."""

from plait.app.loop.builtin_callbacks import EarlyStop, History, Log, Progress, ReplicaChecks, WrongBits
from plait.app.loop.checkpoint_callback import Checkpoints
from plait.app.loop.learning_rate_schedules import (
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from plait.app.loop.loggers import Csv, JsonLines, MLflow, TensorBoard, WeightsAndBiases
from plait.app.loop.parameter_rates import ParameterRate, freeze, parameter_groups
from plait.app.loop.report_callback import Report
from plait.app.loop.straggler_callback import Stragglers
from plait.app.loop.training_loop import Callback, TrainingLoop
from plait.app.loop.validation import Validation

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
    "Stragglers",
    "TensorBoard",
    "TrainingLoop",
    "Validation",
    "WeightsAndBiases",
    "WrongBits",
    "freeze",
    "parameter_groups",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_stable_decay",
]
