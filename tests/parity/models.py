"""Users' models, each awkward in a way of its own. Four layers or more, so that four stages can be cut."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from parity import layers
from parity.layers import CLASSES, HIDDEN, VOCAB


def frozen(module: nn.Module) -> nn.Module:
    """The module, none of whose parameters is trained."""
    return module.requires_grad_(False)


def on_meta() -> nn.Module:
    """Initialised by its modules' own `reset_parameters`."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(HIDDEN, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        )


def convolution() -> nn.Module:
    """Activations in place, and layers without parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(inplace=True),
        nn.GroupNorm(3, 3),
        nn.Flatten(),
        nn.Tanh(),
        nn.Linear(27, CLASSES),
    )


def in_place() -> nn.Module:
    """Layers that write to their input: to the batch, at boundaries and inside."""
    return nn.Sequential(
        nn.Hardtanh(inplace=True),
        nn.Linear(HIDDEN, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Linear(6, CLASSES),
    )


def dictionary() -> nn.Module:
    """A dictionary from the batch to the second layer, then tuples."""
    return nn.Sequential(layers.Open(), layers.Unpack(), layers.Mix(), layers.Mix(), layers.Close())


def tuples() -> nn.Module:
    """Tuples all the way."""
    return nn.Sequential(layers.Open(), layers.Mix(), layers.Mix(), layers.Close())


def skips() -> nn.Module:
    """Nested containers in which a tensor stands twice, goes by untouched or has lost its gradient."""
    return nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN),
        layers.Fork(),
        layers.Carry(),
        layers.Carry(),
        layers.Join(),
        nn.Linear(HIDDEN, CLASSES),
    )


def frozen_first() -> nn.Module:
    """Nothing to train in the first two layers."""
    return nn.Sequential(
        frozen(nn.Embedding(VOCAB, HIDDEN)),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, CLASSES),
    )


def frozen_first_vectors() -> nn.Module:
    """The same on floating-point inputs, whose gradient may be wanted all the same."""
    return nn.Sequential(
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.ReLU(inplace=True),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.Linear(HIDDEN, CLASSES),
    )


def frozen_rest() -> nn.Module:
    """Nothing to train but in the first layer: gradients go all the way and stay nowhere else."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        nn.Tanh(),
        frozen(nn.Linear(HIDDEN, HIDDEN)),
        frozen(nn.Linear(HIDDEN, CLASSES)),
    )


def half_frozen() -> nn.Module:
    """Linears with a frozen weight and a trainable bias, or the other way round."""
    model = nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES)
    )
    model[0].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def twice_in_a_layer() -> nn.Module:
    """A parameter used twice in one layer, and a subclassed and a parametrised linear."""
    return nn.Sequential(
        layers.DoubledLinear(HIDDEN, HIDDEN),
        layers.Twice(),
        weight_norm(nn.Linear(HIDDEN, HIDDEN)),
        layers.Twice(),
        nn.Linear(HIDDEN, CLASSES),
    )


def repeated() -> nn.Module:
    """The same module three times in the sequence."""
    shared = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Sigmoid(), shared, nn.Linear(HIDDEN, CLASSES))


def crossing_ties() -> nn.Module:
    """Ties whose holders cross each other: no two ranks may wait for each other's reductions."""
    linears = [nn.Linear(HIDDEN, HIDDEN) for _ in range(5)]
    linears[2].weight = linears[0].weight
    linears[3].weight = linears[1].weight
    linears[4].bias = linears[0].bias
    linears[4].weight = linears[3].weight
    return nn.Sequential(*linears, nn.Linear(HIDDEN, CLASSES))


def tied_table() -> nn.Module:
    """An embedding table that another layer multiplies with; frozen bits beside it."""
    embedding = nn.Embedding(VOCAB, HIDDEN)
    head = layers.TiedHead(embedding)
    return nn.Sequential(
        embedding, frozen(nn.Linear(HIDDEN, HIDDEN)), nn.Tanh(), head, nn.Linear(VOCAB, CLASSES)
    )


def unused() -> nn.Module:
    """Parameters that the loss does not depend on."""
    return nn.Sequential(layers.Idle(), nn.Tanh(), layers.Idle(), nn.Linear(HIDDEN, CLASSES))


def views() -> nn.Module:
    """Layers that give their input, or a view of it, and scalars as parameters."""
    return nn.Sequential(
        nn.Identity(),
        nn.Embedding(VOCAB, HIDDEN),
        layers.Turn(),
        layers.Temperature(),
        layers.Turn(),
        nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, CLASSES),
    )


def dictionary_to_the_end() -> nn.Module:
    """The loss is given a dictionary."""
    return nn.Sequential(
        layers.Open(), layers.Unpack(), layers.Mix(), layers.Mix(), layers.Close(), layers.Name()
    )


def nested() -> nn.Module:
    """Sequences in sequences."""
    inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)))
    return nn.Sequential(nn.Sequential(nn.Embedding(VOCAB, HIDDEN)), inner, nn.Linear(HIDDEN, CLASSES))


def padded() -> nn.Module:
    """An embedding with a row that does not learn."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN, padding_idx=2),
        nn.LayerNorm(HIDDEN),
        nn.Linear(HIDDEN, HIDDEN, bias=False),
        nn.Linear(HIDDEN, CLASSES),
    )


def transposed() -> nn.Module:
    """Linears with transposed weights; the last is on the table of the first layer, as is a linear."""
    embedding, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
    last = layers.Conv1D(HIDDEN, VOCAB)
    last.weight = head.weight = embedding.weight
    return nn.Sequential(
        embedding, layers.Conv1D(6, HIDDEN), nn.ReLU(inplace=True), layers.Conv1D(HIDDEN, 6), head, last
    )


def buffers() -> nn.Module:
    """Buffers with values."""
    return nn.Sequential(layers.Standardise(), nn.Tanh(), layers.Standardise(), nn.Linear(HIDDEN, CLASSES))


def attention() -> nn.Module:
    """PyTorch's own attention."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN),
        layers.SelfAttention(),
        layers.SelfAttention(),
        nn.Linear(HIDDEN, CLASSES),
    )


def recurrent() -> nn.Module:
    """Layers that run over the length."""
    return nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN), layers.Recurrent(), layers.Recurrent(), nn.Linear(HIDDEN, CLASSES)
    )


def recomputed() -> nn.Module:
    """Layers that save memory on their own."""
    return nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), layers.Recomputed(), layers.Recomputed(), nn.Linear(HIDDEN, CLASSES)
    )


def moody() -> nn.Module:
    """Another function in evaluation mode."""
    return nn.Sequential(layers.Moody(), nn.Tanh(), layers.Moody(), nn.Linear(HIDDEN, CLASSES))
