"""Attention, positions, documents and dropout by definition, in place of plait's own functions.

Softmax attention has all scores, and a mask of all pairs; documents are equal ids that follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils.checkpoint import checkpoint

from plait.tensor.attention import attention
from plait.tensor.attention.attention import attend, share_keys
from plait.tensor.attention.block_attention import AnyDropout, is_active
from plait.tensor.dropout import Dropout
from plait.tensor.nested_values import Value
from plait.tensor.replaceable_functions import Replacements, replacing
from plait.tensor.running_sequence import longest_document, positions
from plait.verification.definitions.float8_scale_recorder import OperandScales
from plait.verification.definitions.router_call_recorder import RoutingCalls

MOST_SCORES = 1 << 25
"""Scores that are held at once: of longer sequences, blocks of queries are computed again in the backward."""
DOCUMENT_IDS = "document_ids"
"""The key of the ids `[rows, length]` in a batch that is a dictionary."""
NEAR = 8.0
"""Rounding errors of the largest value, at most, by which a kernel for attention is off."""
Forward = Callable[..., Any]
"""Given the `Definitions`, a layer and its input, returns the layer's output."""


class Visibility(NamedTuple):
    """Which keys a query sees: by causality, window and document."""

    causal: bool
    """None behind it."""
    window: int | None
    """Those at a distance below it; None: at any."""
    numbers: Tensor | None
    """Those of its document, by the number `[rows, length]` of each position's; None: of all."""

    def mask(self, queries: range, keys: int, device: torch.device) -> Tensor:
        """Return which of `keys` each of `queries` sees: bool `[rows or 1, 1, queries, keys]`."""
        here, there = (torch.arange(one.start, one.stop, device=device) for one in (queries, range(keys)))
        distance = here[:, None] - there
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        if self.numbers is None:
            return seen[None, None]
        numbers = self.numbers.to(device)
        of_one_document = numbers[:, queries.start : queries.stop, None] == numbers[:, None, :]
        return (seen & of_one_document)[:, None]


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Visibility,
    scale: float,
    softcap: float | None = None,
    keep: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `softmax(s) v`, with scores `s = scale · q kᵀ`, or `c · tanh(s / c)` for a softcap of c.

    Tensors are `[rows, heads, length, size]`; query head h reads head `h // (heads / kv heads)` of key and
    value. `keep`: drops weights `[rows, heads, queries, keys]`. `sinks` `[heads]`: one more score of each
    query, without a value.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    rows, heads, queries, _ = query.shape
    block = queries if keep is not None else max(1, MOST_SCORES // max(1, rows * heads * key.shape[2]))
    parts = []
    for start in range(0, queries, block):
        own = range(start, min(start + block, queries))
        mask = sees.mask(own, key.shape[2], query.device)
        given = query[:, :, own.start : own.stop], key, value, mask
        attend = partial(masked_attention, scale=scale, softcap=softcap, keep=keep, sinks=sinks)
        parts.append(checkpoint(attend, *given, use_reentrant=False) if block < queries else attend(*given))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    keep: Callable[[Tensor], Tensor] | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention to the keys that `mask` allows; torch function modes can replace this function."""
    if has_torch_function_variadic(query, key, value):
        arguments = query, key, value, mask, scale, softcap, keep, sinks
        replaced: Tensor = handle_torch_function(masked_attention, (query, key, value), *arguments)
        return replaced
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        last = sinks.to(wide).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, last], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    if keep is not None:
        weights = keep(weights)
    return (weights @ value.to(wide)).to(query.dtype)


def separated(batch: Value) -> tuple[Value, Tensor | None]:
    """Return a batch as the value for the first layer, and its document ids, or None if it has none."""
    if not isinstance(batch, dict) or DOCUMENT_IDS not in batch:
        return batch, None
    rest = {key: value for key, value in batch.items() if key != DOCUMENT_IDS}
    return (next(iter(rest.values())) if len(rest) == 1 else rest), batch[DOCUMENT_IDS]


def numbers_of(ids: Tensor) -> Tensor:
    """Return for each position the number of its document in the row: 0, 0, 1, 1, 1, …; like `ids`."""
    begins = torch.zeros_like(ids)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins.cumsum(1)


def positions_in(ids: Tensor) -> Tensor:
    """Return each position's distance from the start of its document: int64, like `ids`."""
    numbers = numbers_of(ids)
    same = numbers.unsqueeze(2) == numbers.unsqueeze(1)
    return same.tril(-1).sum(2)


class GivenKeys(NamedTuple):
    """Keys, values and mask options of an attention, kept from `share_keys` until `attend` gives queries."""

    key: Tensor
    value: Tensor
    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None


class Definitions:
    """Plain definitions of plait's attention and positions, which a reference run calls in their place.

    Also keeps what these and layers' plain forwards record: windows, routers' calls, scales in float8.
    """

    def __init__(self, *, keeps_near: bool = False) -> None:
        """`keeps_near`: take plait's results where rounding explains their distance from the definition's."""
        self.keeps_near = keeps_near
        self.ids: Tensor | None = None
        """The document ids `[rows, length]` of the running micro-batch, if it has any."""
        self.windows: set[int] = set()
        """The windows of attention since these were last cleared."""
        self.routing = RoutingCalls()
        """The calls of routers in the running layer."""
        self.microbatches_at_once = 1
        """How many run as one batch: each is cast to float8 by itself."""
        self.scales = OperandScales()
        """Of the running micro-batch's linears in float8."""
        self._mistake: Mapping[str, Any] = {}

    @contextmanager
    def running(self, ids: Tensor | None) -> Iterator[None]:
        """Context in which layers run on documents with these ids, and call the plain definitions."""
        self.ids = ids
        replacements: Replacements = {
            attention: self.attention,
            share_keys: lambda *arguments, query_heads, **options: GivenKeys(*arguments, **options),
            attend: lambda query, keys, **options: self.attention(query, *keys, **options),
            positions: self.positions,
            longest_document: self._longest_document,
        }
        try:
            with replacing(replacements):
                yield
        finally:
            self.ids = None

    @property
    def is_mistaken(self) -> bool:
        """Whether attention is computed with a known mistake, as within `mistaken`."""
        return bool(self._mistake)

    @contextmanager
    def mistaken(self, **mistake: Any) -> Iterator[None]:
        """Context in which attention is computed with a known mistake, by which a wrong run is recognised.

        `mask`, `positions`: documents with other ids. `windows`: other windows, by the right ones.
        """
        self._mistake = mistake
        try:
            yield
        finally:
            self._mistake = {}

    def install(self, modules: Iterable[nn.Module], forwards: dict[type[nn.Module], Forward]) -> None:
        """Replace the forward of every module in `modules` whose class is in `forwards`, submodules too."""
        for module in (inner for outer in modules for inner in outer.modules()):
            if type(module) in forwards and "forward" not in vars(module):
                module.forward = partial(forwards[type(module)], self, proxy(module))

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention as `plait.attention` documents it, computed from the definition."""
        if window is not None:
            self.windows.add(window)
            window = self._mistake.get("windows", {}).get(window, window)
        ids = self._mistake.get("mask", self.ids) if documents is None else documents
        sees = Visibility(causal, window, None if ids is None else numbers_of(ids))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        keep = dropout if is_active(dropout) else None
        defined = softmax_attention(query, key, value, sees, scale, softcap, keep, sinks)
        if not self.keeps_near or keep is not None or self._mistake:
            return defined
        with replacing({}):  # the reason to keep it: it has the same bits as the candidate's
            options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks}
            own = attention(query, key, value, causal, window, documents, **options)
        allowed = NEAR * torch.finfo(own.dtype).eps * value.detach().abs().amax()
        return own if bool(((own - defined).detach().abs() <= allowed).all()) else defined

    def positions(self, tensor: Tensor) -> Tensor:
        """Return each token's position in its document: `[length]`, or `[rows, length]`."""
        ids: Tensor | None = self._mistake.get("positions", self.ids)
        if ids is None:
            return torch.arange(tensor.shape[1], device=tensor.device)
        return positions_in(ids).to(tensor.device)

    def _longest_document(self, tensor: Tensor) -> int:
        return int(self.positions(tensor).max()) + 1 if tensor.numel() else 0


def dropout(definitions: Definitions, module: Dropout, x: Tensor) -> Tensor:
    """Return `x` with masked elements set to 0, the others divided by 1 - p, by the module's mask."""
    if not module.training or module.p == 0.0:
        return x
    keep = module.next_mask_maker(x.shape, x.device)()
    return x.masked_fill(~keep, 0.0) * (1.0 / (1.0 - module.p) if module.p < 1.0 else 1.0)
