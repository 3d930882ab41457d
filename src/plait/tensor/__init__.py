"""Layers, losses and sampling whose tensors are cut over the ranks of `tp`, and what cuts a model by rules.

The layers work by themselves, over a group of a mesh, and so does the loss on logits in pieces. `weave` puts
them in the place of a model's own modules, as `plait.rules` says; `regions` proves that the rules fit.
"""

from plait.autograd.full import full_tensor
from plait.autograd.redistribution import redistribute
from plait.tensor.blocks import TensorParallelAttention, TensorParallelMLP
from plait.tensor.cutting import UNEVENLY, Cut
from plait.tensor.embedding import VocabParallelEmbedding
from plait.tensor.given_losses import as_loss, mean_loss
from plait.tensor.linear import ColumnParallelLinear, RowParallelLinear
from plait.tensor.losses import CrossEntropy, Loss, PiecewiseLoss
from plait.tensor.vocabulary import Vocabulary

__all__ = [
    "UNEVENLY",
    "ColumnParallelLinear",
    "CrossEntropy",
    "Cut",
    "Loss",
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
