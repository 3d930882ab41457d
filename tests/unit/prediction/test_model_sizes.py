import pytest
from torch import nn

import plait
from plait.errors import ModelError
from plait.prediction.model_sizes import decoder_of


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sizes_give_the_number_of_parameters(name: str, tied: bool) -> None:
    more = {"kv_heads": 2} if name == "llama" else {}
    sizes = {"layers": 3, "hidden": 96, "heads": 4, "vocab": 500, "context": 64}
    model = getattr(plait.models, name)(tied=tied, **sizes, **more)
    found = decoder_of(model)
    assert found.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(found.kinds) == 8
    assert decoder_of(found) is found


def test_blocks_of_different_sizes_are_refused() -> None:
    model = plait.models.llama(layers=2, hidden=96, heads=4, vocab=500, context=64)
    other = plait.models.llama(layers=1, hidden=96, heads=4, inner=128, vocab=500, context=64)
    blocks = [*model.get_submodule("blocks"), *other.get_submodule("blocks")]  # type: ignore[misc]
    model.blocks = nn.Sequential(*blocks)
    with pytest.raises(ModelError, match="2 different sizes"):
        decoder_of(model)
