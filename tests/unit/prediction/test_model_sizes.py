import pytest
from torch import nn

import plait
from plait.errors import ModelError
from plait.layers.layer_sequence import layer_costs, sequence_of
from plait.loop.meter import flops_per_token
from plait.prediction.decoder import Decoder
from plait.prediction.model_sizes import decoder_of

SIZES = {"layers": 3, "hidden": 96, "heads": 4, "vocab": 500, "context": 64}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sizes_give_parameters_operations_and_costs_of_layers(name: str, tied: bool) -> None:
    more = {"kv_heads": 2, "inner": 200} if name == "llama" else {}
    model = getattr(plait.models, name)(tied=tied, **SIZES, **more)
    found, flags = decoder_of(model), dict.fromkeys(("biases", "positions"), True)
    if name == "llama":
        flags = dict.fromkeys(("gated", "rotary"), True)
    assert found == Decoder(**{"kv_heads": 4, "inner": 384, **SIZES, **more, **flags, "tied": tied})  # type: ignore[arg-type]
    assert found.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.operations_per_token == flops_per_token(model, layers=3, hidden=96, context=64)
    assert [*found.layer_costs] == layer_costs(sequence_of(model).layers)
    assert decoder_of(found) is found


def test_another_model_is_refused_and_one_whose_blocks_differ() -> None:
    model = plait.models.llama(**SIZES)
    other = plait.models.llama(**{**SIZES, "layers": 1}, inner=128)
    blocks = [*model.get_submodule("blocks"), *other.get_submodule("blocks")]  # type: ignore[misc]
    model.blocks = nn.Sequential(*blocks)
    with pytest.raises(ModelError, match="2 different sizes"):
        decoder_of(model)
    with pytest.raises(ModelError, match="the sizes of dict are not known"):
        decoder_of({})
