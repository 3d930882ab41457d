"""What plait relies on of PyTorch's private attention operations: those of a CPU run, those of CUDA on meta.

`tests/gpu/test_attention_kernels.py` runs the latter.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_cases import plain_attention, random_inputs
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait.tensor.attention import fused_kernels
from plait.tensor.attention.fused_kernels import (
    CPU,
    CUDNN,
    EFFICIENT,
    FLASH,
    Attended,
    FusedKernel,
    fused_kernel,
    grouped_attention,
)
from plait.tensor.autograd.eager_operations import TRACE, LayerTrace

SCALE = 0.4


def causal(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril()


def test_a_cpu_has_a_fused_kernel_for_values_up_to_the_width_of_keys_and_dense_rows() -> None:
    query, key, value = random_inputs()
    assert fused_kernel(query, key, value, None, True) is CPU
    assert fused_kernel(query, key, value, torch.ones(37, 53, dtype=torch.bool), False) is CPU
    assert fused_kernel(query, key[:, :2], value[:, :2], None, False) is CPU
    assert fused_kernel(query, key, value[..., :5], None, False) is CPU
    assert fused_kernel(query[..., :5], key[..., :5], value, None, False) is None, "wider values"
    meta = [one.to("meta") for one in (query, key, value)]
    assert fused_kernel(*meta[:2], meta[2][..., :5], None, True) is CPU
    assert fused_kernel(meta[0][..., :5], meta[1][..., :5], meta[2], None, True) is None
    assert fused_kernel(query[..., ::2], key[..., ::2], value[..., ::2], None, False) is None, "dense rows"
    with sdpa_kernel(SDPBackend.MATH):
        assert fused_kernel(query, key, value, None, False) is None
    assert not query.requires_grad


@pytest.mark.parametrize("sizes", [{"n": 0}, {"m": 0}, {"rows": 0}, {"heads": 0, "kv_heads": 0}])
def test_no_fused_kernel_is_chosen_for_empty_tensors(sizes: dict[str, int]) -> None:
    """A CPU's kernel ends the process, by a division by zero."""
    assert fused_kernel(*random_inputs(**sizes), None, False) is None  # type: ignore[arg-type]


class OnGpu(Tensor):
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("choice", "masked", "size", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, False, 8, FLASH),
        (SDPBackend.FLASH_ATTENTION, False, 12, None),
        (SDPBackend.EFFICIENT_ATTENTION, True, 8, EFFICIENT),
        (SDPBackend.CUDNN_ATTENTION, False, 8, CUDNN),
        (SDPBackend.CUDNN_ATTENTION, True, 8, EFFICIENT),
        (SDPBackend.MATH, False, 8, None),
    ],
)
def test_a_gpu_has_the_fused_kernel_that_torch_chooses_for_mask_and_size(
    choice: SDPBackend, masked: bool, size: int, expected: FusedKernel | None
) -> None:
    query = torch.empty(1, 2, 3, size).as_subclass(OnGpu)
    mask = torch.ones(3, 3, dtype=torch.bool) if masked else None
    with patch.object(fused_kernels, "_chosen_backend", lambda *_: choice):
        assert fused_kernel(query, query, query, mask, False) is expected


@pytest.mark.parametrize(
    ("with_fewer", "with_all", "repeats", "kernel"),
    [
        (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, True, EFFICIENT),
        (SDPBackend.FLASH_ATTENTION, SDPBackend.FLASH_ATTENTION, False, FLASH),
        (SDPBackend.MATH, SDPBackend.MATH, False, None),
    ],
)
def test_heads_of_keys_are_repeated_where_only_so_a_gpu_has_a_fused_kernel(
    with_fewer: SDPBackend, with_all: SDPBackend, repeats: bool, kernel: FusedKernel | None
) -> None:
    def chosen(query: Tensor, key: Tensor, *_: Any) -> SDPBackend:
        return with_all if key.shape[1] == query.shape[1] else with_fewer

    query, key, value = (torch.randn(2, heads, 5, 8).as_subclass(OnGpu) for heads in (4, 2, 2))
    attend = functional.scaled_dot_product_attention
    with (
        patch.object(fused_kernels, "_chosen_backend", chosen),
        patch.object(functional, "scaled_dot_product_attention", wraps=attend) as called,
    ):
        assert fused_kernel(query, key, value, None, True) is kernel
        found = grouped_attention(query, key, value, is_causal=True, scale=SCALE)
    assert called.call_args.kwargs["enable_gqa"] is not repeats
    expected = attend(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "repeats"), [(torch.float32, True), (torch.bfloat16, False)])
def test_in_a_traced_layer_heads_are_repeated_in_fp32_without_a_question_to_torch(
    dtype: torch.dtype, repeats: bool
) -> None:
    """torch says MATH of all traced tensors."""
    query, key, value = (torch.randn(2, heads, 5, 8).to(dtype).as_subclass(OnGpu) for heads in (4, 2, 2))
    attend, trace = functional.scaled_dot_product_attention, TRACE.set(LayerTrace({}))
    try:
        with (
            patch.object(fused_kernels, "_chosen_backend", side_effect=AssertionError),
            patch.object(functional, "scaled_dot_product_attention", wraps=attend) as called,
        ):
            grouped_attention(query, key, value, is_causal=True)
    finally:
        TRACE.reset(trace)
    assert called.call_args.kwargs["enable_gqa"] is not repeats


def reference(inputs: Any, mask: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    leaves = [one.clone().requires_grad_() for one in inputs]
    out = plain_attention(*leaves, mask, SCALE)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


@pytest.mark.parametrize(("n", "m"), [(37, 53), (53, 37), (1, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["full", "causal", "bias"])
@pytest.mark.parametrize("width", [8, 5])
def test_the_cpus_fused_kernel_equals_the_formula(n: int, m: int, kind: str, width: int) -> None:
    """Upper-left causal masks, shared heads, narrow values, a bias that is the same for rows and heads."""
    torch.manual_seed(n)
    inputs = random_inputs(kv_heads=2, n=n, m=m, width=width)
    mask = {"full": torch.ones(n, m, dtype=torch.bool), "causal": causal(n, m)}.get(
        kind, torch.rand(n, m) < 0.7
    )
    mask[:, 0] = True
    bias = torch.zeros(n, m + 3, dtype=torch.float64)[:, :m].masked_fill_(~mask, -math.inf)
    bias = bias.expand(2, 4, n, m) if kind == "bias" else None
    out, lse = CPU.forward(*inputs, bias, kind == "causal", SCALE)
    gradient = torch.randn_like(out)
    gradients = CPU.backward(gradient, Attended(*inputs, out, lse), bias, kind == "causal", SCALE)
    for one, other in zip((out, *gradients), reference(inputs, mask, gradient), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert lse.shape == (2, 4, n)


def spread(tensor: Tensor, dim: int) -> Tensor:
    """The same values, with gaps between them along a dim."""
    return torch.stack([tensor, torch.full_like(tensor, math.nan)], dim + 1).select(dim + 1, 0)


def test_the_fused_kernel_gives_the_same_bits_for_any_strides() -> None:
    """But those of the last dim of query, key and value, with which no kernel is chosen."""
    torch.manual_seed(0)
    inputs = random_inputs(kv_heads=2)
    out, lse = CPU.forward(*inputs, None, False, SCALE)
    gradient = torch.randn_like(out)
    expected = CPU.backward(gradient, Attended(*inputs, out, lse), None, False, SCALE)
    for dim in range(4):
        strided = [spread(one, dim) if dim < 3 else one for one in inputs]
        again = CPU.forward(*strided, None, False, SCALE)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        others = [spread(one, dim) if dim < one.dim() else one for one in (gradient, out, lse)]
        gradients = CPU.backward(others[0], Attended(*strided, *others[1:]), None, False, SCALE)
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True)), dim
    summed = torch.ones((), dtype=torch.float64).expand_as(out)
    gradients = CPU.backward(summed, Attended(*inputs, out, lse), None, False, SCALE)
    expected = CPU.backward(torch.ones_like(out), Attended(*inputs, out, lse), None, False, SCALE)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_an_infinite_log_sum_exp_gives_no_gradient() -> None:
    inputs = random_inputs()
    out, lse = CPU.forward(*inputs, None, False, SCALE)
    lse[:, :, 3] = math.inf
    attended = Attended(*inputs, out, lse)
    of_query, of_key, of_value = CPU.backward(torch.ones_like(out), attended, None, False, SCALE)
    assert not of_query[:, :, 3].any()
    assert of_key.isfinite().all()
    assert of_value.isfinite().all()


ON_META = {
    "cpu": (CPU, torch.float64, (2, 4, 37)),
    "flash": (FLASH, torch.bfloat16, (2, 4, 37)),
    "cudnn": (CUDNN, torch.bfloat16, (2, 4, 37)),
    "efficient": (EFFICIENT, torch.float32, (2, 4, 37)),
}


@pytest.mark.parametrize("name", ON_META)
def test_each_fused_operation_is_called_as_its_schema_defines(name: str) -> None:
    kernel, dtype, shape = ON_META[name]
    inputs = [one.to("meta", dtype) for one in random_inputs(kv_heads=2)]
    out, lse = kernel.forward(*inputs, None, True, SCALE)
    assert out.shape == inputs[0].shape
    assert lse.shape == shape
    gradients = kernel.backward(torch.empty_like(out), Attended(*inputs, out, lse), None, True, SCALE)
    assert [one.shape for one in gradients] == [one.shape for one in inputs]
    assert {one.dtype for one in (out, *gradients)} == {dtype}


FORWARDS = {
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("n", [32, 37])
def test_a_backward_takes_a_log_sum_exp_like_that_of_its_forward(name: str, n: int) -> None:
    """Merged ones are `[rows, heads, queries]`, in any memory format."""
    kernel, dtype, _ = ON_META[name]
    inputs = [one.to("meta", dtype) for one in random_inputs(n=n)]
    shapes: list[torch.Size] = []

    def noting(operation: Any, index: int) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            result = operation(*given, **options)
            noted = given[5 + (name == "efficient")] if index else result[1]
            assert noted.is_contiguous()
            shapes.append(noted.shape)
            return result

        return run

    aten, forward = torch.ops.aten, FORWARDS[name]
    with (
        patch.object(aten, forward, noting(getattr(aten, forward), 0)),
        patch.object(aten, f"{forward}_backward", noting(getattr(aten, f"{forward}_backward"), 1)),
    ):
        out, _ = kernel.forward(*inputs, None, False, SCALE)
        merged = torch.empty(2, n, 4, device="meta").transpose(1, 2)
        kernel.backward(torch.empty_like(out), Attended(*inputs, out, merged), None, False, SCALE)
    assert shapes[0] == shapes[1]


def test_the_log_sum_exp_of_cuda_kernels_is_cut_and_padded_to_the_queries() -> None:
    query = torch.empty(2, 4, 37, 8, device="meta", dtype=torch.bfloat16)
    aten = torch.ops.aten
    lse = aten._scaled_dot_product_efficient_attention(query, query, query, None, True)[1]
    assert lse.shape == (2, 4, 64), "padded to a multiple of 32"
    lse = aten._scaled_dot_product_cudnn_attention(query, query, query, None, True)[1]
    assert lse.shape == (2, 4, 37, 1)


class Efficient:
    """The efficient kernel's operations by the CPU's: without shared heads, and with a padded log-sum-exp."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        _: bool,
        __: float,
        is_causal: bool,
        *,
        scale: float,
    ) -> tuple[Tensor | None, ...]:
        assert query.shape[1] == key.shape[1] == value.shape[1]
        out, lse = CPU.forward(query, key, value, bias, is_causal, scale)
        return out, functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf), None, None

    @staticmethod
    def backward(*given: Any, scale: float) -> tuple[Tensor | None, ...]:
        gradient, query, key, value, bias, out, lse, _, _, p, wanted, is_causal = given
        assert (p, wanted) == (0.0, [True, True, True, False])
        assert lse.shape[2] == 64
        assert lse.is_contiguous()
        assert lse[..., 37:].isposinf().all()
        lse = lse[..., :37]
        return *CPU.backward(gradient, Attended(query, key, value, out, lse), bias, is_causal, scale), None


@pytest.mark.parametrize("masked", [False, True])
def test_the_efficient_kernel_repeats_heads(masked: bool) -> None:
    inputs = random_inputs(kv_heads=2)
    bias = None
    if masked:
        bias = torch.zeros(37, 53, dtype=torch.float64).masked_fill_(~causal(37, 53), -math.inf)
    out, lse = CPU.forward(*inputs, bias, False, SCALE)
    gradient = torch.randn_like(out)
    expected = out, lse, *CPU.backward(gradient, Attended(*inputs, out, lse), bias, False, SCALE)
    aten = torch.ops.aten
    with (
        patch.object(aten, "_scaled_dot_product_efficient_attention", Efficient.forward),
        patch.object(aten, "_scaled_dot_product_efficient_attention_backward", Efficient.backward),
    ):
        out, lse = EFFICIENT.forward(*inputs, bias, False, SCALE)
        actual = out, lse, *EFFICIENT.backward(gradient, Attended(*inputs, out, lse), bias, False, SCALE)
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
