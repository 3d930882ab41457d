"""Whole numbers stay whole, stand-ins keep what tensor parallelism respects, both sides have equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from verification_cases import CLASSES, case_of, label, mlp_case, rows_and_classes, verify_here

from parity.case import Case as ParityCase
from parity.cases import USER_CASES, gpt2, llama, sparse_llama, with_values
from parity.dropping import DROPPING, dropping
from parity.pairs import in_quick
from plait.errors import ModelError, PlanError
from plait.plan.plan import Plan, Recompute
from plait.ranks.launch.rank_pool import RankPool
from plait.ranks.mesh import Mesh
from plait.tensor.attention.block_attention import block_backward, block_forward, empty_result, merge
from plait.tensor.experts.gated_activation import GatedActivation
from plait.tensor.float8.cast import factor_of
from plait.tensor.float8.recipes import CastFormat
from plait.tensor.parallel.partition import Vocabulary
from plait.verification.case import Case
from plait.verification.definitions.experts import activated
from plait.verification.definitions.float8 import E4M3, E5M2, LINES, EightBits, cast_factor_for, quantised
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import verify_rank
from plait.verification.reference.integer_mode import (
    GRAIN,
    LARGEST,
    PERIOD,
    STAND_INS,
    IntegerMode,
    WeightedSum,
    fold,
    integer_batch,
    integer_buffer,
    integer_parameter,
    require_integers,
)
from plait.verification.sweep import plans_on
from plait.verification.verify import build_report
from zoo.sparse import BALANCED

PLAN = Plan(microbatches=2)


def whole(*shape: int, seed: int = 0, largest: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest, shape, generator=generator).double()


def is_whole(tensor: Tensor) -> bool:
    return bool((tensor == tensor.round()).all())


@given(st.integers(-(2**40), 2**40))
def test_fold_takes_to_the_nearest_number_a_multiple_of_the_period_away(number: int) -> None:
    folded = float(fold(torch.tensor(float(number), dtype=torch.float64)))
    assert -PERIOD / 2 <= folded <= PERIOD / 2
    assert (folded - number) % PERIOD == 0


def test_fold_folds_the_gradient_too_and_hides_infinity() -> None:
    x = torch.tensor([3.0, 100.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    result = fold(x)
    assert result.tolist() == [3.0, 4.0, 0.0]
    result.backward(torch.tensor([1.0, 21.0, 0.0], dtype=torch.float64))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 5.0, 0.0]


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(),
    "softmax": lambda x: x.softmax(-1),
    "torch.softmax": lambda x: torch.softmax(x, dim=-1),
    "F.softmax": lambda x: functional.softmax(x, -1),
    "layer_norm": lambda x: functional.layer_norm(x, (6,)),
    "rms_norm": lambda x: functional.rms_norm(x, (6,)),
    "sin": torch.sin,
    "cos": lambda x: x.cos(),
}


def test_an_elementwise_integer_replacement_gives_integers_element_by_element() -> None:
    """Its gradient is whole, too."""
    for name, function in ELEMENTWISE.items():
        x = whole(4, 6).requires_grad_()
        with IntegerMode():
            result, other = function(x), x.detach().clone()
            other[1, 2] += 5
            changed = function(other) != result
            changed[1, 2] = False
            assert torch.equal(function(x[:, 3:]), result[:, 3:]) or "norm" in name, name
            if name not in ("sin", "cos"):
                result.backward(whole(4, 6, seed=1))
                assert x.grad is not None
                assert is_whole(x.grad), name
                assert x.grad.any(), name
        assert is_whole(result.detach()), name
        assert result.detach().abs().max() <= PERIOD / 2, name
        assert not changed.any(), name


def backward_of_one(results: Sequence[Tensor]) -> None:
    results[0].backward(torch.ones_like(results[0]))
    results[1].sum().backward()


def backward_of_all(results: Sequence[Tensor]) -> None:
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


@pytest.mark.parametrize("backward", [backward_of_one, backward_of_all])
@pytest.mark.parametrize("function", [functional.silu, lambda x: functional.layer_norm(x, (6,))])
def test_recomputed_functions_have_integer_replacements_in_the_backward(
    backward: Callable[[Sequence[Tensor]], None], function: Callable[[Tensor], Tensor]
) -> None:
    weight = whole(6, 6, seed=1, largest=2)

    def layer(x: Tensor) -> Tensor:
        return function(function(x @ weight) @ weight) * 3

    def again(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, x, use_reentrant=False)
        return result

    gradients = []
    for run in (layer, again):
        x = whole(4, 6).requires_grad_()
        with IntegerMode():
            backward([run(x), run(2 * x)])
        assert x.grad is not None
        gradients.append(x.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.full), "full"])
def test_a_run_that_recomputes_is_equal_bit_by_bit(recompute: Recompute) -> None:
    plan = Plan(microbatches=2, recompute=recompute)
    for case in (mlp_case(mode="exact", steps=1), case_of(gpt2(layers=1), mode="exact", steps=1)):
        assert verify_here(case, plan)


@pytest.mark.parametrize("norm", [functional.layer_norm, functional.rms_norm])
def test_a_norm_has_its_weight_and_bias(norm: Callable[..., Tensor]) -> None:
    """In `IntegerMode` a norm's result is multiplied by its weight, and its bias is added."""
    x, weight, bias = whole(4, 6), whole(6, seed=1, largest=3), whole(6, seed=2, largest=3)
    with IntegerMode():
        plain, scaled = norm(x, (6,)), norm(x, (6,), weight=weight)
        assert torch.equal(scaled, plain * weight)
        if norm is functional.layer_norm:
            assert torch.equal(norm(x, (6,), weight=weight, bias=bias), plain * weight + bias)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    with IntegerMode():
        return functional.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]


def heads(seed: int, count: int = 4) -> Tensor:
    """`[rows, heads, length, features]`."""
    return whole(2, count, 5, 3, seed=seed)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_whole_and_each_head_by_itself(causal: bool) -> None:
    q, k, v = heads(1), heads(2), heads(3)
    result = attention(q, k, v, is_causal=causal)
    assert is_whole(result)
    for half in (slice(0, 2), slice(2, 4)):
        assert torch.equal(attention(q[:, half], k[:, half], v[:, half], is_causal=causal), result[:, half])


@pytest.mark.parametrize("which", ["key", "value"])
def test_causal_attention_sees_no_later_position_and_all_earlier_ones(which: str) -> None:
    q, k, v = heads(1), heads(2), heads(3)
    before = attention(q, k, v, is_causal=True)
    (k if which == "key" else v)[:, :, 3] += 1
    changed = (attention(q, k, v, is_causal=True) != before).all(0).all(0).all(-1)
    assert changed.tolist() == [False, False, False, True, True]


def test_a_mask_of_either_kind_is_what_may_be_seen() -> None:
    q, k, v = heads(1), heads(2), heads(3)
    seen = torch.ones(5, 5).tril().bool()
    added = torch.zeros(5, 5).masked_fill(~seen, -torch.inf)
    expected = attention(q, k, v, is_causal=True)
    assert torch.equal(attention(q, k, v, attn_mask=seen), expected)
    assert torch.equal(attention(q, k, v, attn_mask=added), expected)


def test_integer_attention_handles_query_heads_that_share_a_key_head() -> None:
    q, k, v = heads(1), heads(2, 2), heads(3, 2)
    copied = (k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert torch.equal(attention(q, k, v, enable_gqa=True), attention(q, *copied))


def test_attention_is_its_formula_and_tells_keys_apart_in_the_backward() -> None:
    """In numbers that are not folded."""
    tensors = [whole(2, 4, 5, 3, seed=seed, largest=8).requires_grad_() for seed in (1, 2, 3)]
    gradient, seen = whole(2, 4, 5, 3, seed=4, largest=8), torch.ones(5, 5).tril().double()
    query, key, value = tensors
    expected = seen.sum(1, keepdim=True) * query + seen @ (key.abs() + 2 * value.abs())
    found = attention(*tensors, is_causal=True)
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected, tensors, gradient)
    for one, other in zip(torch.autograd.grad(found, tensors, gradient), wanted, strict=True):
        assert torch.equal(one, other)


def test_attention_has_whole_gradients_for_all_three() -> None:
    tensors = [heads(seed).requires_grad_() for seed in (1, 2, 3)]
    attention(*tensors, is_causal=True).backward(heads(4))
    for tensor in tensors:
        assert tensor.grad is not None
        assert is_whole(tensor.grad)
        assert tensor.grad.any()


@pytest.mark.parametrize("mask", ["full", "causal", torch.rand(5, 4, generator=torch.manual_seed(1)) < 0.5])
def test_blocks_of_attention_add_up_to_all_of_it(mask: Any) -> None:
    """Output and gradients of a block and of the keys after it, merged, are those of all keys at once."""
    q, k, v, gradient = whole(2, 4, 5, 3), whole(2, 2, 6, 3, seed=1), whole(2, 2, 6, 3, seed=2), heads(4)
    pairs = torch.ones(5, 4).tril().bool() if mask == "causal" else torch.ones(5, 4).bool()
    pairs = pairs if isinstance(mask, str) else mask
    tensors = [one.clone().requires_grad_() for one in (q, k, v)]
    seen = torch.cat([pairs, torch.ones(5, 2).bool()], 1)
    expected = attention(*tensors, attn_mask=seen, enable_gqa=True)
    expected.backward(gradient)
    blocks = [(k[:, :, :4], v[:, :, :4], mask), (k[:, :, 4:], v[:, :, 4:], "full")]
    out, lse = empty_result(q, v)
    found = [torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)]
    with IntegerMode():
        for key, value, own in blocks:
            merge(out, lse, *block_forward(q, key, value, own, 1.0))
        for number, (key, value, own) in enumerate(blocks):
            of_query, *of_keys = block_backward(gradient, q, key, value, out, lse, own, 1.0)
            found[0] += of_query
            for total, part in zip(found[1:], of_keys, strict=True):
                total[:, :, 4 * number : 4 * number + 4] += part
    assert torch.equal(out, expected)
    for one, tensor in zip(found, tensors, strict=True):
        assert tensor.grad is not None
        assert torch.equal(one, tensor.grad)


def test_integer_replacements_hold_only_within_their_context() -> None:
    x = torch.tensor([0.3])
    with IntegerMode():
        assert float(torch.tanh(torch.tensor([100.0]))) == 4.0
    assert float(torch.tanh(x)) == pytest.approx(0.2913126)
    assert functional.gelu in STAND_INS


def test_parameters_are_small_whole_numbers_by_name_and_seed() -> None:
    matrix, vector = torch.empty(40, 30), torch.empty(50)
    change = integer_parameter(3)
    made = change("a", matrix)
    assert set(made.flatten().tolist()) == {-1.0, 0.0, 1.0}
    assert set(change("a", vector).tolist()) == {-1.0, 1.0}  # no zeros: it may be a scale
    assert torch.equal(made, integer_parameter(3)("a", matrix))
    assert not torch.equal(made, change("b", matrix))
    assert not torch.equal(made, integer_parameter(4)("a", matrix))
    assert torch.equal(integer_buffer("any", torch.tensor([0.4, 0.6])), torch.tensor([0.0, 1.0]))


@given(st.integers(1, 300))
def test_the_weights_of_a_batch_are_whole_and_add_up_to_a_power_of_two(rows: int) -> None:
    inputs, weights = integer_batch(torch.rand(rows, 3), rows)
    assert is_whole(inputs)
    assert weights.shape == (rows, 3)
    assert (weights > 0).all()
    total = int(weights.sum())
    assert total & (total - 1) == 0


@pytest.mark.parametrize("length", [2**14, 2**15, 40_000, 2**18])
def test_the_weights_of_long_sequences_add_up_to_what_gradients_can_be_divided_by(length: int) -> None:
    _, weights = integer_batch(torch.zeros(2, length), 2)
    total = int(weights.sum())
    assert total & (total - 1) == 0
    assert total <= 1 / GRAIN
    assert (weights.view(-1, 16) > 0).any(1).all()


def test_a_batch_without_positions_has_weights_of_rows() -> None:
    assert integer_batch(torch.rand(5), 5)[1].shape == (5,)


def test_tokens_of_a_batch_stay_what_they_are() -> None:
    given_ = {"tokens": torch.tensor([[5, 3]]), "weight": torch.rand(1, 2), "note": "x"}
    inputs, _ = integer_batch(given_, 1)
    assert inputs["tokens"] is given_["tokens"]
    assert inputs["note"] == "x"
    assert is_whole(inputs["weight"])


def parts(logits: Tensor, targets: Tensor) -> tuple[float, float, Tensor, Tensor]:
    """The loss of the whole, and of this rank's part; and both gradients, of this rank's part."""
    mesh, loss = Mesh(Plan(tp=2)), WeightedSum()
    vocabulary = Vocabulary(logits.shape[-1], mesh.group("tp"))
    own = slice(vocabulary.own.start, vocabulary.own.stop)
    all_of_it, part = logits.clone().requires_grad_(), logits[..., own].clone().requires_grad_()
    one, two = loss.total(all_of_it, targets), loss.total_of_pieces(part, targets, vocabulary)
    one.backward()
    two.backward()
    mesh.close()
    assert all_of_it.grad is not None
    assert part.grad is not None
    return float(one), float(two), all_of_it.grad[..., own], part.grad


def test_the_exact_loss_of_sharded_logits_is_that_of_whole_ones(rank_pool: RankPool) -> None:
    targets = torch.tensor([2, 1, 5])
    for one, two, whole_gradient, shard_gradient in rank_pool.run(parts, whole(3, 4, 11), targets, ranks=2):
        assert one == two
        assert torch.equal(whole_gradient, shard_gradient)


def test_the_exact_loss_of_sharded_numbers_per_row_is_that_of_whole_ones(rank_pool: RankPool) -> None:
    """As many classes as positions: the weights are those of the last dim either way."""
    for one, two, *gradients in rank_pool.run(parts, whole(3, 5), whole(3, 5, seed=1), ranks=2):
        assert one == two
        assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 6)])
def test_the_loss_of_positions_adds_up(shape: tuple[int, ...]) -> None:
    output, weights, loss = whole(*shape), whole(3, 6, seed=1), WeightedSum()
    parts = [loss.total(output[:, own], weights[:, own]) for own in (slice(0, 6, 2), slice(1, 6, 2))]
    assert torch.equal(torch.stack(parts).sum(), loss.total(output, weights))
    assert not torch.equal(loss.total(output, weights.flip(1)), loss.total(output, weights))


def test_an_output_without_positions_has_the_weights_of_rows() -> None:
    output, weights = whole(3, 4), whole(3, 6, seed=1)
    assert torch.equal(WeightedSum().total(output, weights), WeightedSum().total(output, weights.sum(1)))


def test_the_loss_of_parts_adds_up() -> None:
    output, weights, loss = whole(6, 4, 3), torch.tensor([1, 2, 3, 1, 2, 7]), WeightedSum()
    parts = [loss.total(output[rows], weights[rows]) for rows in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.stack(parts).sum(), loss.total(output, weights))
    assert int(loss.weight(weights)) == 16


def test_the_loss_looks_at_all_floating_point_tensors() -> None:
    loss, weights = WeightedSum(), torch.tensor([1, 3])
    one, two = whole(2, 3), whole(2, 4)
    both = loss.total({"a": one, "n": torch.arange(2), "b": [two]}, weights)
    assert torch.equal(both, loss.total(one, weights) + loss.total(two, weights))


@pytest.mark.parametrize("value", [0.1, 2.0**-17, LARGEST * 2, torch.nan, torch.inf])
def test_a_tensor_with_inexact_values_is_refused_in_exact_mode(value: float) -> None:
    tensor = torch.tensor([1.0, value], dtype=torch.float64)
    with pytest.raises(ModelError, match=r"^the output holds .*, and exact mode needs multiples of 2\^-16"):
        require_integers(tensor, "the output")


def test_a_tensor_with_exact_values_is_accepted_in_exact_mode() -> None:
    for tensor in (
        torch.tensor([1.0, -(2.0**-16), LARGEST]),
        torch.tensor([2**60]),
        torch.empty(0),
        torch.tensor(0.5),
    ):
        require_integers(tensor, "it")


class Exponential(nn.Module):
    """Not in the table."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_a_layer_without_integer_replacements_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), Exponential(), nn.Linear(4, CLASSES))
    case = Case(model, WeightedSum(), [rows_and_classes()], VerifyOptions(mode="exact", steps=1))
    with pytest.raises(ModelError, match="the reference's output of layer 2 holds "):
        verify_rank(case, PLAN)


def test_more_than_one_step_is_refused() -> None:
    with pytest.raises(PlanError, match="steps is 2: mode exact takes 1"):
        VerifyOptions(mode="exact")


def test_a_right_run_is_equal_bit_by_bit() -> None:
    report = verify_here(mlp_case(mode="exact", steps=1))
    assert report
    assert report.used == 0.0
    assert report.headline().startswith("EQUAL to one rank, bit by bit: ")


def outcomes(case: ParityCase, plan: Plan, rank_pool: RankPool) -> str:
    """The first line of the report."""
    made = case_of(case, mode="exact", steps=1)
    return build_report(
        rank_pool.run(verify_rank, made, plan, ranks=plan.world), plan, made.options
    ).headline()


@pytest.mark.parametrize(
    "plan", [Plan(tp=2, microbatches=2), Plan(pp=2, microbatches=2, schedule="zb-h1")], ids=label
)
@pytest.mark.parametrize("case", [gpt2(), llama(tied=False)], ids=lambda case: case.name)
def test_gpt2_and_llama_are_equal_bit_by_bit(case: ParityCase, plan: Plan, thread_ranks: RankPool) -> None:
    assert outcomes(case, plan, thread_ranks).startswith("EQUAL to one rank, bit by bit: ")


@pytest.mark.full
def test_compiled_linears_in_float8_are_equal_bit_by_bit() -> None:
    """Of which graphs of the backward cast the gradients."""
    plan = Plan(linears="float8", compile="graphs", microbatches=2)
    case = case_of(gpt2(layers=1, hidden=32, tied=False), mode="exact", steps=1)
    assert verify_here(case, plan).headline().startswith("EQUAL to one rank, bit by bit: ")


IN_TURNS = cycle((gpt2(layers=3, heads=4), llama(layers=3, heads=4, kv_heads=2)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "plan"),
    list(zip(IN_TURNS, plans_on(4, Plan(microbatches=4), 4), strict=False)),
    ids=lambda one: one.name if isinstance(one, ParityCase) else label(one),
)
def test_every_layout_of_four_ranks_in_exact_mode_is_equal_bit_by_bit(
    case: ParityCase, plan: Plan, thread_ranks: RankPool
) -> None:
    """With one model or the other."""
    assert outcomes(case, plan, thread_ranks).startswith("EQUAL to one rank, bit by bit: ")


def test_a_sparse_model_is_equal_bit_by_bit(thread_ranks: RankPool) -> None:
    """Also with losses of routers and corrections, which are left out."""
    plan = Plan(pp=2, dp=2, ep=2, microbatches=2, schedule="zb-h1", strategy="full")
    assert outcomes(sparse_llama(layers=1), plan, thread_ranks).startswith("EQUAL to one rank, bit by bit: ")
    assert verify_here(case_of(BALANCED, mode="exact", steps=1), Plan(microbatches=2, recompute="full"))


WITH_EXPERTS = sorted(
    plans_on(4, Plan(microbatches=4), 4, with_experts=True), key=lambda plan: not plan.divides_experts
)
"""First the plans that divide experts."""
DIVIDED = sum(plan.divides_experts for plan in WITH_EXPERTS)


@pytest.mark.full
@pytest.mark.parametrize("plan", WITH_EXPERTS[:DIVIDED] + WITH_EXPERTS[DIVIDED::4], ids=label)
def test_every_layout_of_experts_in_exact_mode_is_equal_bit_by_bit(
    plan: Plan, thread_ranks: RankPool
) -> None:
    case = sparse_llama(layers=3, experts=3)  # of which the first ranks have more
    assert outcomes(case, plan, thread_ranks).startswith("EQUAL to one rank, bit by bit: ")


ACTIVATIONS = (GatedActivation(), GatedActivation(slope=2.0, offset=1.0, limit=12.0, interleaved=True))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "of GPT-OSS"])
def test_the_activation_of_experts_has_a_whole_gradient_that_is_its_own(activation: GatedActivation) -> None:
    gate_up, of_activated = whole(5, 6, largest=30), whole(5, 3, seed=1)
    with IntegerMode():
        result, gradient = activation.with_gradient(gate_up)
        assert torch.equal(result, activation(gate_up))
        given = gate_up.clone().requires_grad_()
        defined = activated(activation, given)
        defined.backward(of_activated)
        found = gradient(of_activated.clone())
    assert is_whole(result)
    assert torch.equal(result, defined)
    assert given.grad is not None
    assert torch.equal(found, given.grad)
    assert found.any()


WITH_STAND_INS = (
    "on_meta",
    "convolution",
    "in_place",
    "tuples",
    "repeated",
    "tied_table",
    "moody",
    "buffers",
)


@pytest.mark.parametrize("name", in_quick(WITH_STAND_INS, "convolution", "tied_table", "buffers"))
def test_users_models_in_exact_mode_are_equal_bit_by_bit(name: str) -> None:
    (case,) = (case for case in USER_CASES if case.name == name)
    assert verify_here(case_of(case, mode="exact", steps=1))


def test_only_dropout_with_p_one_half_is_equal_bit_by_bit() -> None:
    halves, tenths = (replace(DROPPING, build=with_values(partial(dropping, p))) for p in (0.5, 0.1))
    assert verify_here(case_of(halves, mode="exact", steps=1))
    with pytest.raises(ModelError, match="exact mode needs multiples"):
        verify_here(case_of(tenths, mode="exact", steps=1))


@pytest.mark.parametrize("how", [E4M3, E5M2, LINES])
def test_whole_numbers_are_whole_in_float8_by_scales_that_they_depend_on(how: EightBits) -> None:
    """Numbers of 1 stand for powers of two; both sides cast by the same factors."""
    matrix = torch.tensor([[100.0, 37.0, -5.0, 0.25], [9.0, -2.0, 1.0, 0.0]], dtype=torch.float64)
    with IntegerMode():
        cast = quantised(matrix, how, 1)
        alone = quantised(matrix[1:], how, 1)
        form = CastFormat(how.dtype, "row" if how.by_line else "tensor", how.power_of_two)
        own = factor_of(matrix.abs().amax(1, keepdim=True).float(), form)
        assert torch.equal(own, cast_factor_for(matrix.abs().amax(1, keepdim=True).float(), how))
    values = cast.numbers * cast.unit
    steps = values / GRAIN
    assert torch.equal(steps, steps.round())
    assert bool((values[0] != matrix[0]).any())
    assert torch.equal(values[1:], alone.numbers * alone.unit) == how.by_line
