"""The definitions of the reference run, compared with PyTorch, with transformers, and with literals."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import huggingface_cases as cases
from parity.cases import GPT2_VOCAB, draw_contexts
from plait.engine.local_batch import local_inputs
from plait.models.layers.layer_sequence import sequence_of
from plait.tensor.attention.attention import attend, share_keys
from plait.tensor.replaceable_functions import Replaceable, replacing
from plait.tensor.running_sequence import ContextParallelism, running
from plait.verification.definitions import attention_and_dropout
from plait.verification.definitions.attention_and_dropout import (
    Definitions,
    Visibility,
    numbers_of,
    positions_in,
    separated,
    softmax_attention,
)
from plait.verification.definitions.huggingface import FORWARDS
from plait.verification.definitions.rotary import angles_at, base_frequencies, rotated, scaled_frequencies

IDS = torch.tensor([[7, 7, 7, 2, 2, 7], [1, 2, 2, 2, 2, 2]])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_document_is_a_sequence_of_equal_consecutive_ids() -> None:
    assert numbers_of(IDS).tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    assert positions_in(IDS).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    tokens = torch.zeros(2, 6)
    value, ids = separated({"tokens": tokens, "document_ids": IDS})
    assert value is tokens
    assert ids is IDS
    assert separated(tokens) == (tokens, None)


@pytest.mark.parametrize(
    ("sees", "expected"),
    [
        (Visibility(True, None, None), ["x...", "xx..", "xxx.", "xxxx"]),
        (Visibility(True, 2, None), ["x...", "xx..", ".xx.", "..xx"]),
        (Visibility(False, 2, None), ["xx..", "xxx.", ".xxx", "..xx"]),
        (Visibility(True, None, torch.tensor([[0, 0, 1, 1]])), ["x...", "xx..", "..x.", "..xx"]),
    ],
)
def test_each_visibility_has_the_listed_mask(sees: Visibility, expected: list[str]) -> None:
    mask = sees.mask(range(4), 4, torch.device("cpu"))
    assert mask.shape == (1, 1, 4, 4)
    assert ["".join("x" if seen else "." for seen in row) for row in mask[0, 0].tolist()] == expected


def test_attention_is_that_of_torch_also_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = drawn(2, 4, 6, 3), drawn(2, 2, 6, 3), drawn(2, 2, 6, 5)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    for most in (1 << 25, 100):
        monkeypatch.setattr(attention_and_dropout, "MOST_SCORES", most)
        leaves = [one.clone().requires_grad_() for one in (query, key, value)]
        found = softmax_attention(*leaves, Visibility(True, None, None), 1 / math.sqrt(3))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        gradients = torch.autograd.grad(found.square().sum(), leaves)
        again = [one.clone().requires_grad_() for one in (query, key, value)]
        right = functional.scaled_dot_product_attention(*again, is_causal=True, enable_gqa=True)
        for one, other in zip(gradients, torch.autograd.grad(right.square().sum(), again), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_plaits_functions_are_replaced_within_the_context_only() -> None:
    book, tensors = Definitions(), drawn(3, 2, 2, 6, 4).unbind()
    with book.running(IDS):
        assert plait.positions(IDS).tolist() == positions_in(IDS).tolist()
        packed = plait.attention(*tensors, softcap=0.8, window=2)
        keys = share_keys(*tensors[1:], True, 2, query_heads=2)
        shared = attend(tensors[0], keys, softcap=0.8)
    assert plait.positions(IDS).tolist() == list(range(6))
    assert book.windows == {2}
    expected = plait.attention(*tensors, True, 2, IDS, softcap=0.8)
    for found in (packed, shared):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_a_function_is_replaced_by_the_one_it_returned() -> None:
    @Replaceable
    def add(one: int, other: int) -> int:
        return one + other

    with replacing({add: lambda one, other: one * other}):
        assert add(2, 3) == 6
        with replacing({}):
            assert add(2, other=3) == 5
    assert add(2, 3) == 5


def test_rotation_is_a_product_of_complex_numbers() -> None:
    x, positions = drawn(1, 2, 5, 7), torch.tensor([0, 3, 1, 9, 2])
    frequencies = base_frequencies(50.0, 6, torch.float64, torch.device("cpu"))
    found = rotated(x, angles_at(positions, frequencies, 1.5))
    turned = torch.complex(x[..., :3], x[..., 3:6]) * torch.polar(
        torch.full((5, 3), 1.5, dtype=torch.float64), positions[:, None] * frequencies
    )
    expected = torch.cat([turned.real, turned.imag, x[..., 6:]], -1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert frequencies.tolist() == pytest.approx([1.0, 50.0 ** (-1 / 3), 50.0 ** (-2 / 3)])


SCALINGS = {
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn-set": {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn-given": {"factor": 2.0, "attention_factor": 1.25},
    "yarn-exact": {"factor": 4.0, "truncate": False},
    "yarn-one": {"factor": 1.0},
}


@pytest.mark.transformers
def test_scaled_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, original in product(SCALINGS, (8, 64, 2048)):
        parameters = {
            "rope_type": name.partition("-")[0],
            "rope_theta": 500.0,
            "original_max_position_embeddings": original,
            **SCALINGS[name],
        }
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters
        )
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        found = scaled_frequencies(config.rope_parameters, 16, 4096)
        assert found is not None
        assert found[0].dtype == torch.float64
        torch.testing.assert_close(found[0].float(), expected, rtol=1e-6, atol=0)
        assert found[1] == pytest.approx(factor), (name, original)


def defined(model: nn.Module, tokens: Tensor) -> Tensor:
    """What plait's layers around a model of transformers give by definition."""
    layers = [layer.module for layer in sequence_of(plait.models.from_huggingface(model)).layers]
    book, value = Definitions(), tokens
    book.install(layers, FORWARDS)
    (sequence,) = local_inputs([tokens], ContextParallelism.of_one_rank()).sequences
    with torch.no_grad(), running(sequence), book.running(None):
        for layer in layers:
            value = layer(value)
    return value


@pytest.mark.transformers
def test_layers_of_huggingface_by_definition_give_what_transformers_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Angles too, whatever plait has for them; up to float32, in which transformers computes some numbers."""
    from plait.models.huggingface.common import Rotary

    tokens = draw_contexts(GPT2_VOCAB)(3, torch.Generator().manual_seed(3))[0]
    right = Rotary.forward
    for name, make in cases.MODELS.items():
        model = cases.drawn(make).eval()
        with torch.no_grad():
            expected = model(tokens).logits
        found = [defined(model, tokens)]
        with monkeypatch.context() as patched:
            patched.setattr(Rotary, "forward", lambda *given: [1 - one for one in right(*given)])
            found.append(defined(model, tokens))
        for logits in found:
            assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max()), name


def test_a_scaling_without_a_definition_is_left_to_the_model() -> None:
    plain = scaled_frequencies({"rope_theta": 100.0}, 4, 16)
    assert plain is not None
    assert (plain[0].tolist(), plain[1]) == (pytest.approx([1.0, 0.1]), 1.0)
    assert scaled_frequencies({"rope_type": "longrope", "rope_theta": 100.0}, 8, 16) is None


def test_in_16_bits_plaits_attention_is_kept_where_it_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    book, tensors = Definitions(keeps_near=True), drawn(3, 2, 2, 6, 4).bfloat16().unbind()
    own = plait.attention(*tensors)
    with book.running(None):
        assert torch.equal(plait.attention(*tensors), own)
        with monkeypatch.context() as patched:
            wrong = functional.scaled_dot_product_attention
            patched.setattr(
                functional, "scaled_dot_product_attention", lambda *given, **more: -wrong(*given, **more)
            )
            found = plait.attention(*tensors)
    torch.testing.assert_close(found, own, rtol=0, atol=0.05)
