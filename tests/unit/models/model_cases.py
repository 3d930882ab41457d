"""What the tests of both families need: values for a model, and attention as one of two ranks has it."""

from __future__ import annotations

import copy

from torch import nn

from plait.models.initial_values import initial_value
from plait.models.layers.layer_sequence import sequence_of
from plait.plan.rules import match
from plait.rules import Rules


def filled(model: nn.Sequential) -> nn.Sequential:
    """The model with values, as one rank would fill them."""
    sequence = sequence_of(model)
    tied = model.head.output.weight is model.embedding.token.weight
    values = {
        name: initial_value(layer.module, layer.path, name.removeprefix(f"{layer.path}."), 0)
        for name, users in sequence.users.items()
        for layer in [sequence.layers[users[0]]]
    }
    for layer in sequence.layers:
        for name, _ in layer.module.named_buffers():
            values[f"{layer.path}.{name}"] = initial_value(layer.module, layer.path, name, 0)
    model.to_empty(device="cpu")
    if tied:
        model.head.output.weight = model.embedding.token.weight
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data.copy_(values[name])
    return model


def half_of(attention: nn.Module, half: int) -> nn.Module:
    """`attention` with linears for one half of its heads; a single key and value head stays on both.

    The output has no bias: it is added once, to the sum over the halves.
    """
    mine = copy.deepcopy(attention)
    for name in ("query", "key", "value"):
        full = getattr(attention, name)
        heads = full.out_features // attention.head_size
        rows = slice(None) if heads == 1 else _part(full.out_features, half)
        part = nn.Linear(full.in_features, len(full.weight[rows]), full.bias is not None)
        part.weight.data = full.weight.detach()[rows]
        if full.bias is not None:
            part.bias.data = full.bias.detach()[rows]
        setattr(mine, name, part)
    full = attention.output
    mine.output = nn.Linear(full.in_features // 2, full.out_features, bias=False)
    mine.output.weight.data = full.weight.detach()[:, _part(full.in_features, half)]
    return mine


def _part(features: int, half: int) -> slice:
    return slice(half * features // 2, (half + 1) * features // 2)


def uncut(model: nn.Module, rules: Rules) -> list[str]:
    """The paths of linears and embeddings that no rule names. Every rule has to match."""
    matched = match(rules, (name for name, _ in model.named_modules()))
    kinds = (nn.Linear, nn.Embedding)
    return [
        name for name, module in model.named_modules() if isinstance(module, kinds) and name not in matched
    ]
