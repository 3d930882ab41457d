"""Operations of single calls of torch on the meta device, beside literal sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.memory.storage_tracker import StorageTracker
from plait.estimate.time.operation_times import DeviceOperation, Elementwise, FusedAttention, Product
from plait.tensor.experts.grouped_float8_products import BATCHED_PRODUCT
from plait.tensor.float8.scaled_product import SCALED_PRODUCT


def recorded(function: Callable[[], object]) -> tuple[DeviceOperation, ...]:
    recorder = OperationRecorder()
    with torch.device("meta"), recorder.recording("forward"):
        function()
    return recorder.take().forward


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


A, B, TOTAL = meta(3, 5), meta(5, 7), meta(3, 7)
HALF, EIGHT = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("call", "product"),
    [
        (lambda: A @ B, Product(3, 7, 5, result_bytes=4)),
        (lambda: torch.addmm(meta(7), A, B), Product(3, 7, 5, result_bytes=4)),
        (lambda: TOTAL.addmm_(A, B), Product(3, 7, 5, result_bytes=8)),
        (lambda: TOTAL.addmm_(A, B, beta=0), Product(3, 7, 5, result_bytes=4)),
        (lambda: meta(2, 6, 3, 5) @ meta(2, 6, 5, 7), Product(3, 7, 5, 12, result_bytes=4)),
        (lambda: torch.baddbmm(meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7)), Product(3, 7, 5, 2, 8)),
        (lambda: TOTAL.add_(A.to(HALF) @ B.to(HALF)), Product(3, 7, 5, result_bytes=8)),
    ],
)
def test_a_matrix_product_has_its_sizes_and_the_bytes_of_its_result(
    call: Callable[[], object], product: Product
) -> None:
    """Twice as many where it is added to what is there, in one operation or in two."""
    assert [one for one in recorded(call) if isinstance(one, Product)] == [product]
    assert product.result_bytes != 8 or recorded(call)[-1] == product


@pytest.mark.parametrize(
    ("call", "grouped"),
    [
        (lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 7), out=meta(2, 3, 7)), True),
        (lambda: meta(2, 3, 7).baddbmm_(meta(2, 3, 5), meta(2, 5, 7)), True),
        (
            lambda: BATCHED_PRODUCT(
                meta(2, 3, 5, dtype=EIGHT), meta(2, 5, 7, dtype=EIGHT), out=meta(2, 3, 7)
            ),
            True,
        ),
        (lambda: torch.bmm(meta(2, 3, 5), meta(2, 5, 7)), False),
        (lambda: torch.mm(A, B, out=TOTAL), False),
    ],
)
def test_products_of_experts_are_linears_and_other_batches_are_of_attention(
    call: Callable[[], object], grouped: bool
) -> None:
    (product,) = recorded(call)
    assert isinstance(product, Product)
    assert (product.grouped, product.is_linear) == (grouped, grouped or product.batch == 1)


def test_a_scaled_product_is_one_in_float8_also_within_a_graph() -> None:
    a, b, one = meta(32, 64, dtype=EIGHT), meta(48, 64, dtype=EIGHT), meta()
    whole = functional.ScalingType.TensorWise
    for call in (
        lambda: functional.scaled_mm(a, b.t(), one, whole, one, whole, output_dtype=HALF),
        lambda: SCALED_PRODUCT(a, one, b.t(), one, HALF),
    ):
        (product,) = recorded(call)
        assert product == Product(32, 48, 64, in_float8=True)


def test_an_addition_that_is_not_of_a_product_just_computed_counts_by_itself() -> None:
    assert recorded(lambda: (A @ B).add_(meta(7)))[1:] == (Elementwise(4 * (21 + 7 + 21)),)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_multiplies_as_many_numbers_in_each_of_its_passes(groups: int) -> None:
    given, weight = meta(2, 8, 10), meta(6, 8 // groups, 3)
    window, features = 3 * 8 // groups, 6 // groups
    forward = Product(2 * 8, features, window, groups, result_bytes=4)

    def train() -> None:
        inputs = given.clone().requires_grad_(), weight.clone().requires_grad_(), meta(6).requires_grad_()
        functional.conv1d(*inputs, groups=groups).backward(meta(2, 6, 8))

    found = recorded(train)
    assert [one for one in found if isinstance(one, Product)] == [
        forward,
        Product(16, window, features, groups, result_bytes=4),
        Product(features, window, 16, groups, result_bytes=4),
    ]
    assert Elementwise(2 * 6 * 8 * 4) in found


def test_a_transposed_convolution_multiplies_each_input_by_each_weight() -> None:
    found = recorded(lambda: functional.conv_transpose1d(meta(2, 8, 10), meta(8, 6, 3)))
    assert found == (Product(2 * 10, 6 * 3, 8, result_bytes=4),)


@pytest.mark.parametrize(
    "call",
    [
        lambda: A.view(5, 3).t().unsqueeze(0).expand(2, 3, 5)[0].detach(),
        lambda: A.split(2),
        lambda: torch.unsafe_split_with_sizes(A, [1, 4], 1),
        lambda: A.reshape(-1),
        lambda: (torch.empty(3), A.new_empty(4), torch.empty_like(A)),
        lambda: meta(3, 5).set_(A),  # type: ignore[call-overload]
    ],
)
def test_views_and_allocations_compute_nothing(call: Callable[[], object]) -> None:
    assert recorded(call) == ()


@pytest.mark.parametrize(
    ("call", "nbytes"),
    [
        (lambda: A + A, 4 * 45),
        (lambda: A.mul_(2), 4 * 30),
        (lambda: A.copy_(meta(3, 5, dtype=HALF)), 4 * 15 + 2 * 15),
        (lambda: A.to(HALF), 6 * 15),
        (lambda: A + meta(3, 1).expand(3, 5), 4 * (15 + 3 + 15)),
        (lambda: torch.add(A, A, out=meta(3, 5)), 4 * 45),
        (lambda: functional.embedding(meta(4, dtype=torch.int64), meta(100, 5)), 4 * 8 + 2 * 4 * 20),
        (lambda: meta(100, 5).index_add_(0, meta(3, dtype=torch.int64), A), 3 * 8 + 3 * 4 * 15),
        (lambda: torch._foreach_add_([A, B], [A, B]), 3 * 4 * (15 + 35)),
    ],
)
def test_other_operations_read_their_operands_and_write_their_results(
    call: Callable[[], object], nbytes: int
) -> None:
    found = recorded(call)
    assert all(isinstance(one, Elementwise) and not one.activation for one in found)
    assert sum(one.nbytes for one in found if isinstance(one, Elementwise)) == nbytes


def test_activations_are_marked_forward_and_backward() -> None:
    def train() -> None:
        functional.gelu(A.clone().requires_grad_()).backward(meta(3, 5))

    _, forward, backward = recorded(train)[:3]
    assert forward == Elementwise(2 * 4 * 15, activation=True)
    assert backward == Elementwise(3 * 4 * 15, activation=True)


@pytest.mark.parametrize(("queries", "keys", "seen"), [(8, 8, 0.5), (4, 8, 0.25), (8, 4, 0.75)])
def test_causal_attention_computes_the_pairs_that_a_query_sees(queries: int, keys: int, seen: float) -> None:
    """As many as the mask has, but for the half of the diagonal that the formula leaves out."""

    def train() -> None:
        query, key = meta(2, 6, queries, 16).requires_grad_(), meta(2, 3, keys, 16).requires_grad_()
        attend = functional.scaled_dot_product_attention
        with StorageTracker().tracking():
            output = attend(query, key, key, is_causal=True, enable_gqa=True)
            torch.autograd.backward([output], [torch.empty_like(output)])

    forward, backward = [one for one in recorded(train) if isinstance(one, FusedAttention)]
    assert forward == FusedAttention(2, 6, 3, 16, queries, keys, seen)
    assert backward == FusedAttention(2, 6, 3, 16, queries, keys, seen, backward=True)
    mask = torch.ones(queries, keys).tril()
    assert mask.mean() - seen == pytest.approx(min(queries, keys) / (2 * queries * keys))
