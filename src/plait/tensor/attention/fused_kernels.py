"""PyTorch's fused attention kernels with their log-sum-exp, one function for each of its private operations.

`torch.nn.functional.scaled_dot_product_attention` calls the same operations, but does not return the
log-sum-exp, and its backward takes that of its own keys only. Tensors are `[rows, heads, length, width]`; key
and value may have fewer heads, each for consecutive query heads. The CPU's kernel takes values as wide as
keys: narrower ones get features of 0, which are left out of the results. A bias is added to the scores,
`[rows, heads, queries, keys]`; a causal mask begins in the upper left corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional
from torch.nn.attention import SDPBackend

from plait.ranks.accelerator import is_accelerator, sent
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.running_sequence import DocumentBounds

Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of query, key and value."""
LSE_MULTIPLE = 32
"""The efficient kernel's log-sum-exp is padded to a multiple of so many queries."""


class Attended(NamedTuple):
    """Query, key and value of an attention call, with its output and log-sum-exp over all keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class FusedKernel(NamedTuple):
    """Forward and backward of one fused kernel; the last arguments of both: bias, causal, scale."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
    """Returns the output and the log-sum-exp `[rows, heads, queries]` of query, key and value."""
    backward: Callable[[Tensor, Attended, Tensor | None, bool, float], Gradients]
    """Returns gradients, given that of the output, which may be of attention to other keys, too."""


def fused_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> FusedKernel | None:
    """Return the fused kernel that PyTorch would choose to train with these tensors, or None if it has none.

    `mask`: bool. On the meta device the CPU's kernel, which allocates as the others do.
    """
    if 0 in (query.numel(), key.numel(), value.numel()):
        return None  # the CPU's kernel divides by sizes
    if query.is_meta:
        return CPU if key.shape[:3] == value.shape[:3] and value.shape[3] <= key.shape[3] else None
    if query.device.type == "cpu" and value.shape[3] < key.shape[3]:
        value = key
    choice = _chosen_backend(query, key, value, mask, causal)
    if query.device.type == "cpu":
        return CPU if choice == SDPBackend.FLASH_ATTENTION else None
    if choice == SDPBackend.MATH and _needs_repeated_heads(query, key, value, mask, causal):
        return EFFICIENT  # which repeats them
    if choice == SDPBackend.FLASH_ATTENTION:
        return FLASH if query.shape[-1] % 8 == 0 else None
    if choice == SDPBackend.CUDNN_ATTENTION:
        return CUDNN if mask is None else EFFICIENT
    return EFFICIENT if choice == SDPBackend.EFFICIENT_ATTENTION else None


def _chosen_backend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> SDPBackend:
    """Return what `scaled_dot_product_attention` would choose for training; there is no public way to ask."""
    query, groups = query.detach().requires_grad_(), query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=groups)
    return SDPBackend(choice)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Return `scaled_dot_product_attention` of key and value with fewer heads than the query (GQA).

    Of the kernels of GPUs only those for 16 bits take fewer heads: for others each is repeated, where torch
    would compute, and save, the scores of all pairs.
    """
    repeats = is_accelerator(query) and _needs_repeated_heads(query, key, value, None, is_causal)
    if repeats:
        key, value = repeated_heads(key, query), repeated_heads(value, query)
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=not repeats
    )


def _needs_repeated_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> bool:
    """Return whether a GPU has a fused kernel only if key and value have as many heads as the query."""
    if query.shape[1] == key.shape[1]:
        return False
    if TRACE.get() is not None:  # torch does not know the device of a traced tensor, and would say MATH
        return query.dtype == torch.float32
    if _chosen_backend(query, key, value, mask, causal) != SDPBackend.MATH:
        return False
    key, value = (one[:, :1].expand(-1, query.shape[1], -1, -1) for one in (key, value))
    return _chosen_backend(query, key, value, mask, causal) != SDPBackend.MATH


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of PyTorch's fused CPU kernel, which has no public name."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, _as_wide(value, key), 0.0, causal, attn_mask=bias, scale=scale
    )
    if value.shape[3] < key.shape[3]:
        out = out[..., : value.shape[3]]
    # On the meta device torch 2.11 gives float32 for all inputs, where the CPU gives float64 for float64.
    return out, lse.to(torch.promote_types(query.dtype, torch.float32))


def _cpu_backward(
    gradient: Tensor, attended: Attended, bias: Tensor | None, causal: bool, scale: float
) -> Gradients:
    query, key, value, out, lse = attended
    if out.stride(-1) != 1:
        out = out.contiguous()  # else the kernel would read other elements
    gradient, wide, out = (_as_wide(one, key) for one in (gradient, value, out))
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, wide, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return of_query, of_key, of_value[..., : value.shape[3]]


def _as_wide(tensor: Tensor, key: Tensor) -> Tensor:
    """Return values, or their gradient, padded with zeros to the width of keys."""
    missing = key.shape[3] - tensor.shape[3]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    assert bias is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse


def _flash_backward(
    gradient: Tensor, attended: Attended, bias: Tensor | None, causal: bool, scale: float
) -> Gradients:
    query, key, value, out, lse = attended
    assert bias is None
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    lengths = query.shape[2], key.shape[2]
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(gradient, query, key, value, out, lse.contiguous(), None, None, *lengths, 0.0, causal),
        *(seed, offset),
        scale=scale,
    )
    return of_query, of_key, of_value


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    assert bias is None
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return out, lse.reshape(query.shape[:3])


def _cudnn_backward(
    gradient: Tensor, attended: Attended, bias: Tensor | None, causal: bool, scale: float
) -> Gradients:
    query, key, value, out, lse = attended
    assert bias is None
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    lengths = query.shape[2], key.shape[2]
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient, query, key, value, out, lse.contiguous().unsqueeze(-1), seed, offset),
        *(None, None, None, *lengths, 0.0, causal),
        scale=scale,
    )
    return of_query, of_key, of_value


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    key, value = (repeated_heads(one, query) for one in (key, value))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : query.shape[2]]


def _efficient_backward(
    gradient: Tensor, attended: Attended, bias: Tensor | None, causal: bool, scale: float
) -> Gradients:
    query, key, value, out, lse = attended
    heads = key.shape[1]
    lse = functional.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=math.inf).contiguous()
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    key, value = (repeated_heads(one, query) for one in (key, value))
    of_query, of_key, of_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, query, key, value, bias, out, lse, seed, offset, 0.0),
        *([True, True, True, False], causal),
        scale=scale,
    )
    return of_query, _summed(of_key, heads), _summed(of_value, heads)


def repeated_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with a head for each query head."""
    times = query.shape[1] // tensor.shape[1]
    return tensor.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of `heads` heads as the sum over their repetitions."""
    rows, repeated, *sizes = gradient.shape
    return gradient.reshape(rows, heads, repeated // heads, *sizes).sum(2)


CPU = FusedKernel(cpu_attention, _cpu_backward)
FLASH = FusedKernel(_flash_forward, _flash_backward)
CUDNN = FusedKernel(_cudnn_forward, _cudnn_backward)
EFFICIENT = FusedKernel(_efficient_forward, _efficient_backward)


@dataclass(frozen=True)
class PackedCall:
    """A call of flash attention on a GPU for packed documents, where a rank has whole sequences.

    The rows stand one after another, and the kernel is told where documents begin ("varlen" in
    FlashAttention-2). Where it does not take the tensors, there is a call for each document: see
    `visible_keys`.
    """

    begins: Tensor
    """Where each document begins in the rows one after another, and where they end: int32 `[n + 1]`."""
    longest: int
    """The number of positions of the longest document."""
    causal: bool
    window: int | None

    @staticmethod
    def of(documents: DocumentBounds, causal: bool, window: int | None) -> PackedCall:
        """Return the kernel call for packed `documents`; `causal` and `window` as in `plait.attention`."""
        rows, length = len(documents.starts), documents.length
        begins = ((first + row * length for first in each) for row, each in enumerate(documents.starts))
        every = torch.tensor([*chain.from_iterable(begins), rows * length], dtype=torch.int32)
        return PackedCall(every, documents.longest, causal, window)

    def on(self, device: torch.device) -> PackedCall:
        """Return a copy whose index tensors are on `device`."""
        return replace(self, begins=sent(self.begins, device))

    def computes(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether flash attention takes these tensors; False unless they are on a GPU.

        They are `[rows, heads, length, size]`.
        """
        if not is_accelerator(query) or 0 in query.shape or query.shape[3] % 8:
            return False
        groups = query.shape[1] != key.shape[1]
        learnt = query.detach().requires_grad_()
        return can_use_flash_attention(SDPAParams(learnt, key, value, None, 0.0, self.causal, groups))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return attention and the log-sum-exp `[rows, heads, length]` of its scores."""
        rows, heads, length, _ = query.shape
        flat = (_one_row(one) for one in (query, key, value))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(*flat, self.begins, self.begins, self.longest, self.longest, 0.0, self.causal, False),
            scale=scale,
            **self._window_sizes(),
        )
        return _of_rows(out, rows), lse.view(heads, rows, length).transpose(0, 1)

    def backward(self, gradient: Tensor, attended: Attended, scale: float) -> Gradients:
        """Return the gradients of query, key and value, given that of the output."""
        query, key, value, out, lse = attended
        seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        flat = (_one_row(one) for one in (gradient, query, key, value, out))
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            *(*flat, lse.transpose(0, 1).flatten(1).contiguous(), self.begins, self.begins),
            *(self.longest, self.longest, 0.0, self.causal, seed, offset),
            scale=scale,
            **self._window_sizes(),
        )
        of_query, of_key, of_value = (_of_rows(one, len(query)) for one in (of_query, of_key, of_value))
        return of_query, of_key, of_value

    def _window_sizes(self) -> dict[str, int | None]:
        """Return how many keys a query sees before and after itself; None for all."""
        sides = None if self.window is None else self.window - 1
        return {"window_size_left": sides, "window_size_right": 0 if self.causal else sides}


def _one_row(tensor: Tensor) -> Tensor:
    """Return `[rows, heads, length, size]` as `[rows · length, heads, size]`, a view of a linear's heads."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _of_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return `[rows · length, heads, size]` as `[rows, heads, length, size]`."""
    return tensor.reshape(rows, len(tensor) // rows, *tensor.shape[1:]).transpose(1, 2)
