from __future__ import annotations

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
from model_cases import filled, half_of, uncut
from torch import Tensor, nn

from parity.kernels import Kernels
from plait.errors import ModelError
from plait.models import llama
from plait.models.layers.layer_sequence import layer_costs, sequence_of
from plait.models.layers.model_validation import refuse_layout_dependence
from plait.models.llama import RULES, Attention
from plait.models.model_helpers import INITIAL_STD
from plait.models.result_cache import ResultCache
from plait.models.rotary import rotary_angles, rotate
from plait.plan.decoder_sizes import default_inner

SMALL = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "inner": 20, "vocab": 11, "context": 8}


def real(**sizes: int | bool) -> nn.Sequential:
    """With values, as one rank would fill them."""
    return filled(llama(**{**SMALL, **sizes}))  # type: ignore[arg-type]


def lively(**sizes: int | bool) -> nn.Sequential:
    """In float64, with values that are large enough for every part to matter."""
    torch.manual_seed(0)
    model = real(**sizes).double()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.5)
    return model


def norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned_by_hand(x: Tensor, base: float) -> Tensor:
    """`[batch, length, heads, size]`: each pair of features as a complex number, times e^(i · angle)."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = torch.tensor(
        [[position / base ** (2 * i / (2 * half)) for i in range(half)] for position in range(length)],
        dtype=torch.float64,
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention_by_hand(
    x: Tensor, weights: dict[str, Tensor], heads: int, kv_heads: int, base: float
) -> Tensor:
    normed = norm_by_hand(x, weights["norm.weight"])
    query, key, value = (
        (normed @ weights[f"{name}.weight"].T).unflatten(-1, (count, -1))
        for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    )
    query, key = turned_by_hand(query, base), turned_by_hand(key, base)
    mixed = []
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = query[:, :, head] @ key[:, :, shared].mT / math.sqrt(query.shape[-1])
        future = torch.ones_like(scores).triu(1).bool()
        shares = scores.masked_fill(future, -math.inf).exp()
        mixed.append(shares / shares.sum(-1, keepdim=True) @ value[:, :, shared])
    return x + torch.cat(mixed, dim=-1) @ weights["output.weight"].T


def mlp_by_hand(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    normed = norm_by_hand(x, weights["norm.weight"])
    gate = normed @ weights["gate.weight"].T
    swish = gate / (1 + (-gate).exp())
    return x + (swish * (normed @ weights["up.weight"].T)) @ weights["down.weight"].T


def by_hand(model: nn.Sequential, tokens: Tensor, heads: int, kv_heads: int, base: float) -> Tensor:
    weights = {name: value.detach() for name, value in model.state_dict().items()}

    def of(path: str) -> dict[str, Tensor]:
        return {name.removeprefix(path): value for name, value in weights.items() if name.startswith(path)}

    x = weights["embedding.token.weight"][tokens]
    for block in range(SMALL["layers"]):
        x = attention_by_hand(x, of(f"blocks.{block}.attention."), heads, kv_heads, base)
        x = mlp_by_hand(x, of(f"blocks.{block}.mlp."))
    return norm_by_hand(x, weights["head.norm.weight"]) @ weights["head.output.weight"].T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("base", [10000, 50])
def test_llama_equals_the_formulas(kv_heads: int, base: int) -> None:
    model = lively(kv_heads=kv_heads, rope_base=base)
    tokens = torch.randint(11, (3, 8))
    expected = by_hand(model, tokens, 4, kv_heads, base)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.transformers
def test_llama_equals_the_llama_of_transformers() -> None:
    import transformers

    ours = lively()
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).double()
    renamed = {theirs_name(name): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(renamed)
    tokens = torch.randint(11, (3, 8))
    # Their angles are in float32.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def theirs_name(name: str) -> str:
    """What Hugging Face calls a parameter."""
    names = {
        "embedding.token": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.output": "lm_head",
        "blocks": "model.layers",
        "attention.norm": "input_layernorm",
        "mlp.norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def experts_by_hand(x: Tensor, weights: dict[str, Tensor], top_k: int) -> Tensor:
    """Each token by itself: the sum of its experts' outputs by their shares, and that of the shared ones."""

    def expert(token: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up @ token).chunk(2)
        return down @ (gate / (1 + (-gate).exp()) * up)

    normed, result = norm_by_hand(x, weights["norm.weight"]), x.clone()
    for row, position in product(range(x.shape[0]), range(x.shape[1])):
        token = normed[row, position]
        logits = (weights["mixture.router.weight"] @ token).tolist()
        chosen = sorted(range(len(logits)), key=lambda one: -logits[one])[:top_k]
        total = sum(math.exp(logits[one]) for one in chosen)
        for one in chosen:
            gate_up, down = (weights[f"mixture.experts.{name}_proj"][one] for name in ("gate_up", "down"))
            result[row, position] += math.exp(logits[one]) / total * expert(token, gate_up, down)
        shared = (weights[f"mixture.shared.{name}.weight"] for name in ("gate_up", "down"))
        result[row, position] += expert(token, *shared)
    return result


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_sparse_llama_equals_the_formulas(top_k: int) -> None:
    layer = lively(experts=5, top_k=top_k, shared=6).blocks[1].mlp
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    weights = {name: value.detach() for name, value in layer.state_dict().items()}
    torch.testing.assert_close(layer(x), experts_by_hand(x, weights, top_k), rtol=1e-12, atol=1e-12)


def test_a_sparse_llama_is_a_flat_sequence_with_a_rule_for_each_matrix_that_is_cut() -> None:
    model = llama(**SMALL, experts=6, shared=10)
    assert all(parameter.is_meta for parameter in model.parameters())
    refuse_layout_dependence(sequence_of(model))
    assert uncut(model, model.rules) == []
    assert uncut(llama(**SMALL, experts=6), llama(**SMALL, experts=6).rules) == []
    mlp = 1 + 24 * 6 + 2 * 3 * 24 * 20 + 3 * 24 * 10
    assert layer_costs(sequence_of(model).layers)[2::2][:2] == [mlp, mlp]


def test_projections_back_start_smaller_in_experts_too() -> None:
    model = real(experts=4, shared=64, hidden=64, inner=64)
    stds = {name: float(value.detach().std()) for name, value in model.named_parameters() if value.dim() > 1}
    for name, std in stds.items():
        back = name.endswith(("down_proj", "down.weight", "attention.output.weight"))
        assert std == pytest.approx(INITIAL_STD / (2 if back else 1), rel=0.15), name
    assert sum(name.endswith(("down_proj", "down.weight")) for name in stds) == 4


def test_the_default_has_as_many_parameters_as_the_published_7b() -> None:
    model = llama()
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616
    assert default_inner(4096) == 11008
    assert default_inner(96) == 256
    assert default_inner(97) == 512


def test_llama_is_a_flat_sequence_of_layers_on_meta() -> None:
    model = llama(**SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []
    assert model(torch.zeros(2, 8, dtype=torch.int64, device="meta")).shape == (2, 8, 11)
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
    assert sequence.users["embedding.token.weight"] == (0,)
    assert sequence_of(llama(**SMALL, tied=True)).users["embedding.token.weight"] == (0, 5)
    assert model.context == 8
    attention = 2 * 24 * 24 + 2 * 24 * 12 + 2 * 8 * 24
    mlp = 1 + 3 * 24 * 20
    assert layer_costs(sequence.layers) == [1, attention, mlp, attention, mlp, 1 + 24 * 11]


def test_later_tokens_do_not_change_llamas_earlier_outputs() -> None:
    model = lively()
    tokens = torch.randint(11, (2, 8))
    logits = model(tokens)
    for position in range(1, 8):
        changed = tokens.clone()
        changed[:, position:] = (tokens[:, position:] + 1) % 11
        other = model(changed)
        torch.testing.assert_close(other[:, :position], logits[:, :position])
        assert not torch.allclose(other[:, position], logits[:, position])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_half_of_the_heads_on_each_rank_sum_to_the_whole(kv_heads: int) -> None:
    attention = lively(kv_heads=kv_heads).blocks[0].attention
    assert isinstance(attention, Attention)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    halves = [half_of(attention, half) for half in (0, 1)]
    assert [half.key.out_features for half in halves] == [6 * max(1, kv_heads // 2)] * 2
    total = sum(half(x) - x for half in halves)
    torch.testing.assert_close(x + total, attention(x), rtol=1e-12, atol=1e-12)


def test_every_matrix_of_llama_has_a_rule() -> None:
    model = llama(**SMALL)
    assert model.rules is RULES
    assert uncut(model, RULES) == []


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_rotary_angles_are_float32_and_rotated_tensors_keep_their_dtype(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    x = torch.ones(300, 2, dtype=dtype)
    cosines, sines = rotary_angles(300, 2, 10000.0, x)
    assert cosines.dtype == sines.dtype == wide
    assert cosines[299].item() == pytest.approx(math.cos(299), rel=1e-4)
    turned = rotate(x, cosines, sines)
    assert turned.dtype == dtype
    wanted = [math.cos(299) - math.sin(299), math.cos(299) + math.sin(299)]
    assert turned[299].tolist() == pytest.approx(wanted, rel=1e-2)


def test_angles_are_computed_once_for_all_layers_and_micro_batches() -> None:
    """Eight operations; the bits are those of angles computed anew."""
    model, tokens = lively(layers=3), torch.arange(8).view(2, 4)
    counts = []
    for _ in range(3):
        with Kernels() as kernels:
            output = model(tokens)
        counts.append(kernels.names)
    first, second, third = counts
    assert first["cos"] == first["sin"] == 1
    assert second == third
    assert (first - second).total() == 8
    with patch.object(ResultCache, "get", lambda self, key, like, compute: compute()), Kernels() as kernels:
        anew = model(tokens)
    assert torch.equal(anew, output)
    assert (kernels.names - second).total() == 8 * 3


def test_initial_values_of_llama_have_the_listed_spreads() -> None:
    model = real(hidden=64, inner=96, vocab=300)
    values = {name: value.detach() for name, value in model.named_parameters()}
    residual = INITIAL_STD / math.sqrt(2 * SMALL["layers"])
    spreads = {
        "embedding.token.weight": INITIAL_STD,
        "blocks.0.attention.query.weight": INITIAL_STD,
        "blocks.0.attention.key.weight": INITIAL_STD,
        "blocks.1.attention.output.weight": residual,
        "blocks.0.mlp.gate.weight": INITIAL_STD,
        "blocks.1.mlp.up.weight": INITIAL_STD,
        "blocks.1.mlp.down.weight": residual,
        "head.output.weight": INITIAL_STD,
    }
    for name, spread in spreads.items():
        assert values[name].std().item() == pytest.approx(spread, rel=0.1), name
    norms = [value for name, value in values.items() if name.endswith("norm.weight")]
    assert len(norms) == 5
    assert all((value == 1).all() for value in norms)


def test_sizes_below_one_and_what_is_no_flag_are_refused() -> None:
    for name in SMALL:
        with pytest.raises(ModelError, match=rf"model\.{name} is 0: give a whole number of at least 1"):
            llama(**{**SMALL, name: 0})
    with pytest.raises(ModelError, match=r"model\.tied is 1: "):
        llama(**SMALL, tied=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden": 26},
            r"model\.hidden = 26 is not divisible by model\.heads = 4: set model.hidden to 24 or 28",
        ),
        (
            {"kv_heads": 3},
            r"model\.kv_heads = 3 does not divide model\.heads = 4: set model\.kv_heads to 1 or 2 or 4",
        ),
        ({"hidden": 20}, r"makes heads of 5 features, .* pairs of them: set model.hidden to 16 or 24"),
        ({"rope_base": 0.0}, r"model\.rope_base is 0\.0: give a number above 0"),
        ({"rope_base": math.inf}, r"model\.rope_base is inf: give a number above 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        llama(**{**SMALL, **sizes})  # type: ignore[arg-type]


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ModelError, match="a sequence of 9 tokens is longer than the model's context of 8"):
        real()(torch.zeros(1, 9, dtype=torch.int64))
