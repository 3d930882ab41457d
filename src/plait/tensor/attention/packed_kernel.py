"""Attention within all documents of a micro-batch by one call of flash attention, on a GPU.

The rows stand one after another, and the kernel is told where documents begin ("varlen" in FlashAttention-2).
Where it does not take the tensors, or a rank has parts of rows, there is a call for each document
(`visibility`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from plait.ranks.device import is_accelerator, sent
from plait.tensor.attention.fused_kernels import Gradients
from plait.tensor.running_sequence import DocumentBounds


@dataclass(frozen=True)
class PackedCall:
    """One call for whole rows of documents, whose queries see the documents' keys within a window."""

    begins: Tensor
    """Where each document begins in the rows one after another, and where they end: int32 `[n + 1]`."""
    longest: int
    """The number of positions of the longest document."""
    causal: bool
    window: int | None

    @staticmethod
    def of(documents: DocumentBounds, causal: bool, window: int | None) -> PackedCall:
        """Return the call for `documents`; `causal` and `window`: as for `plait.attention`."""
        rows, length = len(documents.starts), documents.length
        begins = ((first + row * length for first in each) for row, each in enumerate(documents.starts))
        every = torch.tensor([*chain.from_iterable(begins), rows * length], dtype=torch.int32)
        return PackedCall(every, documents.longest, causal, window)

    def on(self, device: torch.device) -> PackedCall:
        """Return the call with its indices on `device`."""
        return replace(self, begins=sent(self.begins, device))

    def computes(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether flash attention takes these tensors, `[rows, heads, length, size]`, on their GPU."""
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

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
    ) -> Gradients:
        """Return the gradients of query, key and value."""
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
