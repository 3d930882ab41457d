from __future__ import annotations

import math

import pytest
import torch
from model_cases import filled, half_of, uncut
from torch import nn

from plait.errors import ModelError
from plait.models import gpt2
from plait.models.gpt2 import RULES, Attention
from plait.models.layers.layer_sequence import sequence_of
from plait.models.layers.model_validation import refuse_layout_dependence
from plait.models.model_helpers import INITIAL_STD

SMALL = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 11, "context": 8}


def real(**sizes: int | bool) -> nn.Sequential:
    """With values, as one rank would fill them."""
    return filled(gpt2(**{**SMALL, **sizes}))  # type: ignore[arg-type]


def test_gpt2_small_has_as_many_parameters_as_the_original() -> None:
    model = gpt2(layers=12, hidden=768, heads=12, vocab=50257, context=1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    untied = gpt2(tied=False)
    assert sum(parameter.numel() for parameter in untied.parameters()) == 124_439_808 + 50257 * 768


def test_gpt2_is_a_flat_sequence_of_layers_on_meta() -> None:
    model = gpt2(**SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []
    sequence = sequence_of(model)
    refuse_layout_dependence(sequence)
    assert [layer.path for layer in sequence.layers] == [
        "embedding",
        "blocks.0.attention",
        "blocks.0.mlp",
        "blocks.1.attention",
        "blocks.1.mlp",
        "head",
    ]
    assert sequence.users["embedding.token.weight"] == (0, 5)
    assert model.context == 8


def test_later_tokens_do_not_change_gpt2s_earlier_outputs() -> None:
    model = real()
    tokens = torch.randint(11, (2, 8))
    logits = model(tokens)
    assert logits.shape == (2, 8, 11)
    for position in range(1, 8):
        changed = tokens.clone()
        changed[:, position:] = (tokens[:, position:] + 1) % 11
        other = model(changed)
        torch.testing.assert_close(other[:, :position], logits[:, :position])
        assert not torch.allclose(other[:, position], logits[:, position])


def test_attention_equals_the_formula() -> None:
    torch.manual_seed(0)
    attention = Attention(8, 2, 16, 0.02).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    normed = attention.norm(x)
    query, key, value = (
        linear(normed).view(3, 5, 2, 4).permute(0, 2, 1, 3)
        for linear in (attention.query, attention.key, attention.value)
    )
    scores = query @ key.mT / math.sqrt(4)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value).permute(0, 2, 1, 3).reshape(3, 5, 8)
    torch.testing.assert_close(attention(x), x + attention.output(mixed), rtol=1e-12, atol=1e-12)


def test_half_of_the_heads_on_each_rank_sum_to_the_whole() -> None:
    torch.manual_seed(0)
    attention = Attention(16, 4, 16, 0.02).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    halves = sum(half_of(attention, half)(x) - x for half in (0, 1))
    torch.testing.assert_close(halves + x + attention.output.bias, attention(x), rtol=1e-12, atol=1e-12)


def test_every_matrix_but_the_positions_has_a_rule() -> None:
    model = gpt2(**SMALL)
    assert model.rules is RULES
    assert uncut(model, RULES) == ["embedding.position"]


def test_initial_values_of_gpt2_have_the_published_spreads() -> None:
    values = {
        name: value.detach() for name, value in real(hidden=64, vocab=300, tied=False).named_parameters()
    }
    residual = INITIAL_STD / math.sqrt(2 * SMALL["layers"])
    spreads = {
        "embedding.token.weight": INITIAL_STD,
        "embedding.position.weight": INITIAL_STD / 2,
        "blocks.0.attention.query.weight": INITIAL_STD,
        "blocks.0.attention.output.weight": residual,
        "blocks.1.mlp.up.weight": INITIAL_STD,
        "blocks.1.mlp.down.weight": residual,
        "head.output.weight": INITIAL_STD,
    }
    for name, spread in spreads.items():
        assert values[name].std().item() == pytest.approx(spread, rel=0.1), name
    for name, value in values.items():
        if name.endswith("bias"):
            assert not value.any(), name
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name


def test_an_untrained_gpt2_has_the_loss_of_a_uniform_guess() -> None:
    logits = real(vocab=200)(torch.randint(200, (4, 8)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(200, (32,)))
    assert loss.item() == pytest.approx(math.log(200), abs=0.1)


def test_sizes_below_one_and_what_is_no_flag_are_refused() -> None:
    for name in SMALL:
        with pytest.raises(ModelError, match=rf"model\.{name} is 0: give a whole number of at least 1"):
            gpt2(**{**SMALL, name: 0})
    with pytest.raises(ModelError, match=r"model\.tied is 1: "):
        gpt2(**SMALL, tied=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden", "near"), [(18, "16 or 20"), (3, "4, ")])
def test_heads_must_divide_hidden(hidden: int, near: str) -> None:
    with pytest.raises(
        ModelError,
        match=rf"model\.hidden = {hidden} is not divisible by model\.heads = 4: set model.hidden to {near}",
    ):
        gpt2(**{**SMALL, "hidden": hidden})


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ModelError, match="a sequence of 9 tokens is longer than the model's context of 8"):
        real()(torch.zeros(1, 9, dtype=torch.int64))
