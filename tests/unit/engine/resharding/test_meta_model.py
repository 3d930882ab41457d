"""The model of an engine, put together again from its layers."""

from __future__ import annotations

from torch import nn

import plait
from plait.engine.fingerprint import structure_of
from plait.engine.resharding.meta_model import meta_model
from plait.models.layers.layer_sequence import sequence_of, without_values


def nested() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    inner = nn.Sequential(shared, nn.ReLU(), nn.Sequential(nn.Linear(3, 3, bias=False), shared))
    model = nn.Sequential(nn.Linear(2, 3), inner, nn.LayerNorm(3))
    model[2].bias = shared.bias
    return model


def test_layers_come_back_under_their_paths_with_what_they_share() -> None:
    before = sequence_of(nested())
    model = meta_model(without_values(before), None)
    after = sequence_of(model)
    assert [one.path for one in after.layers] == ["0", "1.0", "1.1", "1.2.0", "1.2.1", "2"]
    assert (after.parameters.keys(), after.users) == (before.parameters.keys(), before.users)
    assert all(one.is_meta for one in model.parameters())
    structures = [
        structure_of(*(layer.module for layer in one.layers)) for one in (without_values(before), after)
    ]
    assert structures[0] == structures[1]
    assert list(model.state_dict()) == list(nested().state_dict())


def test_a_model_of_one_layer_is_that_layer_and_the_longest_sequence_is_kept() -> None:
    alone = sequence_of(nn.Linear(2, 3))
    assert meta_model(alone, None) is alone.layers[0].module
    gpt = plait.models.gpt2(layers=1, hidden=8, heads=2, vocab=11, context=4)
    model = meta_model(sequence_of(gpt), 4)
    assert model.context == 4  # type: ignore[comparison-overlap]
    assert not hasattr(meta_model(sequence_of(gpt), None), "context")
