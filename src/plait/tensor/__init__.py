"""Layers, losses and sampling whose tensors are cut over the ranks of `tp`, and what cuts a model by rules.

The layers work by themselves, over a group of a mesh, and so does the loss on logits in pieces. `apply_rules`
puts them in the place of a model's own modules, as `plait.rules` says; `proof` proves that the rules fit.
"""

from plait.autograd.redistribution import full_tensor, redistribute
from plait.tensor.blocks import TensorParallelAttention, TensorParallelMLP
from plait.tensor.embedding import VocabParallelEmbedding
from plait.tensor.linear import ColumnParallelLinear, RowParallelLinear
from plait.tensor.losses import CrossEntropy, Loss, PiecewiseLoss
from plait.tensor.partition import UNEVEN, Partition
from plait.tensor.torch_losses import as_loss, mean_loss
from plait.tensor.vocabulary import Vocabulary

__all__ = [
    "UNEVEN",
    "ColumnParallelLinear",
    "CrossEntropy",
    "Loss",
    "Partition",
    "PiecewiseLoss",
    "RowParallelLinear",
    "TensorParallelAttention",
    "TensorParallelMLP",
    "VocabParallelEmbedding",
    "Vocabulary",
    "as_loss",
    "full_tensor",
    "mean_loss",
    "redistribute",
]
