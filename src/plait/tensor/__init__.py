"""Tensor parallelism: parallel layers, losses and sampling, and the rules that apply them to a model.

The parallel layers and the loss on partitioned logits work over any group of a mesh. `apply_rules` replaces a
model's modules by them, following `plait.rules`; `gradient_proof` proves that the rules fit;
`torch_parallelize_plan` translates plans of torch's `parallelize_module` into rules.
"""

from typing import Any

from plait.package import submodule
from plait.tensor.autograd.redistribution import full_tensor, redistribute
from plait.tensor.direct_preference import PreferenceLoss, answer_log_probs, preference_batch, token_log_probs
from plait.tensor.experts.balance_experts import balance_experts
from plait.tensor.experts.experts import Experts
from plait.tensor.experts.router import Router
from plait.tensor.experts.router_losses_of_step import ExpertLoad
from plait.tensor.experts.routing import Routing
from plait.tensor.losses import CrossEntropy, Loss, PiecewiseLoss, SequenceLoss
from plait.tensor.parallel.attention_and_mlp import TensorParallelAttention, TensorParallelMLP
from plait.tensor.parallel.embedding_and_norm import VocabParallelEmbedding
from plait.tensor.parallel.linear import ColumnParallelLinear, RowParallelLinear
from plait.tensor.parallel.partition import UNEVEN, Partition, Vocabulary
from plait.tensor.torch_losses import as_loss, mean_loss

__all__ = [
    "UNEVEN",
    "ColumnParallelLinear",
    "CrossEntropy",
    "ExpertLoad",
    "Experts",
    "Loss",
    "Partition",
    "PiecewiseLoss",
    "PreferenceLoss",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SequenceLoss",
    "TensorParallelAttention",
    "TensorParallelMLP",
    "VocabParallelEmbedding",
    "Vocabulary",
    "answer_log_probs",
    "as_loss",
    "balance_experts",
    "full_tensor",
    "mean_loss",
    "preference_batch",
    "redistribute",
    "token_log_probs",
]


def __getattr__(name: str) -> Any:
    return submodule(__name__, name)
