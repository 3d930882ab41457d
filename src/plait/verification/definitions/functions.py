"""`Definitions`: replaces plait's functions and the forwards of its layers, for one reference run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn

from plait.tensor.attention import attention
from plait.tensor.attention.attention import attend, share_keys
from plait.tensor.attention.kernels import AnyDropout, is_active
from plait.tensor.dropout import Dropout
from plait.tensor.proof_marks import Replacements, replacing
from plait.tensor.running_sequence import longest_document, positions
from plait.verification.definitions.attention import Visibility, numbers_of, positions_in, softmax_attention

NEAR = 8.0
"""Rounding errors of the largest value, at most, by which a kernel for attention is off."""
Forward = Callable[..., Any]
"""Given the `Definitions`, a layer and its input, returns the layer's output."""


class GivenKeys(NamedTuple):
    """The arguments of `plait.tensor.attention.share_keys`."""

    key: Tensor
    value: Tensor
    causal: bool
    window: int | None
    documents: Tensor | None


class Definitions:
    """The functions that a reference run calls in place of plait's, for the documents that it runs on."""

    def __init__(self, *, keeps_near: bool = False) -> None:
        """`keeps_near`: take what plait computes where rounding explains how far it is from that."""
        self.keeps_near = keeps_near
        self.ids: Tensor | None = None
        """The document ids `[rows, length]` of the running micro-batch, if it has any."""
        self.windows: set[int] = set()
        """The windows of attention since these were last cleared."""
        self._mask_ids: Tensor | None = None
        self._position_ids: Tensor | None = None
        self._other_windows: Mapping[int, int] = {}

    @contextmanager
    def running(self, ids: Tensor | None) -> Iterator[None]:
        """Within the context, layers run on documents with these ids, and compute by definition."""
        self.ids = self._mask_ids = self._position_ids = ids
        try:
            with replacing(self._replacements):
                yield
        finally:
            self.ids = self._mask_ids = self._position_ids = None

    @contextmanager
    def mistaken(
        self,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        windows: Mapping[int, int] | None = None,
    ) -> Iterator[None]:
        """Within the context, compute attention with given mistakes: other documents or another window."""
        self._mask_ids = self.ids if mask is None else mask
        self._position_ids = self.ids if positions is None else positions
        self._other_windows = windows or {}
        try:
            yield
        finally:
            self._mask_ids = self._position_ids = self.ids
            self._other_windows = {}

    def install(self, modules: Iterable[nn.Module], forwards: dict[type[nn.Module], Forward]) -> None:
        """Replace the forward of each module, and of those within, whose type is in `forwards`."""
        for module in (inner for outer in modules for inner in outer.modules()):
            if type(module) in forwards and "forward" not in vars(module):
                module.forward = partial(forwards[type(module)], self, proxy(module))

    @property
    def _is_mistaken(self) -> bool:
        """Whether masks, positions or windows are others now: see `mistaken`."""
        has_other_ids = self._mask_ids is not self.ids or self._position_ids is not self.ids
        return has_other_ids or bool(self._other_windows)

    @property
    def _replacements(self) -> Replacements:
        return {
            attention: self.attention,
            share_keys: self._share_keys,
            attend: self._attend,
            positions: self.positions,
            longest_document: self._longest_document,
        }

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool = True,
        window: int | None = None,
        documents: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: AnyDropout | None = None,
    ) -> Tensor:
        """Return what `plait.attention` is documented to return for these arguments."""
        if window is not None:
            self.windows.add(window)
            window = self._other_windows.get(window, window)
        ids = self._mask_ids if documents is None else documents
        sees = Visibility(causal, window, None if ids is None else numbers_of(ids))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        keep = dropout if is_active(dropout) else None
        defined = softmax_attention(query, key, value, sees, scale, softcap, keep)
        if not self.keeps_near or keep is not None or self._is_mistaken:
            return defined
        with replacing({}):  # the reason to keep it: it has the same bits as the candidate's
            own = attention(query, key, value, causal, window, documents, scale=scale, softcap=softcap)
        allowed = NEAR * torch.finfo(own.dtype).eps * value.detach().abs().amax()
        return own if bool(((own - defined).detach().abs() <= allowed).all()) else defined

    def _share_keys(
        self,
        key: Tensor,
        value: Tensor,
        causal: bool = True,
        window: int | None = None,
        documents: Tensor | None = None,
        *,
        query_heads: int,
    ) -> GivenKeys:
        return GivenKeys(key, value, causal, window, documents)

    def _attend(self, query: Tensor, keys: GivenKeys, **options: Any) -> Tensor:
        return self.attention(query, *keys, **options)

    def positions(self, tensor: Tensor) -> Tensor:
        """Return the positions of dim 1 of `tensor` in their documents: `[length]`, or `[rows, length]`."""
        if self._position_ids is None:
            return torch.arange(tensor.shape[1], device=tensor.device)
        return positions_in(self._position_ids).to(tensor.device)

    def _longest_document(self, tensor: Tensor) -> int:
        return int(self.positions(tensor).max()) + 1 if tensor.numel() else 0


def dropout(definitions: Definitions, module: Dropout, x: Tensor) -> Tensor:
    """Return `x` with the elements outside of the module's mask set to 0, the others divided by 1 - p."""
    if not module.training or module.p == 0.0:
        return x
    keep = module.next_mask_maker(x.shape, x.device)()
    return x.masked_fill(~keep, 0.0) * (1.0 / (1.0 - module.p) if module.p < 1.0 else 1.0)
