"""`attention`: softmax attention that knows sliding windows, packed documents and context parallelism.

On one rank it is `scaled_dot_product_attention`. Where an engine divides sequences over `cp`, each rank has
the queries, keys and values of its own positions, and gets the attention of its queries to all of them.

`attention(query, key, value)` is `attend(query, share_keys(key, value))`. The two halves let a layer send its
keys before it computes its queries.

    query     [rows, heads, length, size]
    key       [rows, kv heads, length, size]
    value     [rows, kv heads, length, width]
    result    [rows, heads, length, width]

rows: of the micro-batch. heads: those that this rank of `tp` has; kv heads divide them, each for consecutive
query heads. length: the positions that this rank of `cp` has. size and width: features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real

from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ModelError
from plait.plan.context_parallel_heads import heads_of_ranks
from plait.ranks.accelerator import is_accelerator
from plait.tensor.attention.block_attention import (
    AnyDropout,
    Scaling,
    WeightDropoutMask,
    attention_with_dropout,
    is_active,
)
from plait.tensor.attention.fused_kernels import grouped_attention
from plait.tensor.attention.key_exchange_plan import Mask
from plait.tensor.attention.ring import KeyBlocks, KeyExchange, attend_to_all, share
from plait.tensor.attention.ulysses import attend_by_heads, evenly_shared, method_choice, to_heads
from plait.tensor.attention.visible_keys import document_bounds
from plait.tensor.autograd.eager_operations import TRACE, LayerTrace, TensorForm
from plait.tensor.autograd.kept_results import with_kept_operations
from plait.tensor.dropout import Dropout, tag_dropout
from plait.tensor.position_marks import positions_may_mix
from plait.tensor.replaceable_functions import Replaceable
from plait.tensor.running_sequence import ContextParallelism, DocumentBounds, LocalSequence, running_sequence


@Replaceable
def attention(
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
    """Return softmax attention `[rows, heads, length, width]`, causal by default, within each document only.

    `query` `[rows, heads, length, size]`, `key` `[rows, kv heads, length, size]`, `value` with `width` in
    place of `size`; kv heads may be fewer, each for consecutive query heads. `causal`: no position sees a
    later one. `window`: a position sees those at a distance below it.
    `documents`: ids `[rows, length]` of the whole sequences, by default those of the batch that an engine
    runs; a document is a run of equal ids. `scale`: of the scores, by default `size ** -0.5`.
    `softcap`: a bound c of the scores s, which become c · tanh(s / c); no fused kernel has it. `dropout`: of
    the attention weights, `[rows, heads, length, length]`, in training mode. `sinks` `[heads]`: of each head
    a score, as that of one more key, whose value is 0; it is neither scaled nor capped.

    Communication under context parallelism, over `cp`, as `Plan.context_parallel` chooses: keys and values,
    and in the backward their gradients; or queries, keys, values and outputs, and all gradients. Unless
    `Plan.sequence_parallel` is "keep", keys and values, or outputs, are sent again in the backward. Raises
    ModelError for shapes that do not fit.
    """
    tensors = {"query": query, "key": key, "value": value}
    numbers = {"window": window, "scale": scale, "softcap": softcap}
    _require_arguments(tensors, numbers, causal, documents, dropout)
    keys = share_keys.original(key, value, causal, window, documents, query_heads=query.shape[1])
    return attend.original(query, keys, scale=scale, softcap=softcap, dropout=dropout, sinks=sinks)


def heads_of(projected: Tensor, size: int) -> Tensor:
    """Return `[rows, length, heads · size]` as `[rows, heads, length, size]`, for any number of heads."""
    heads: Tensor = projected.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return heads.transpose(1, 2)


def _require_arguments(
    tensors: Mapping[str, object],
    numbers: Mapping[str, object],
    causal: object,
    documents: object,
    dropout: object,
) -> None:
    """Raise ModelError where an argument of `attention` has a wrong type or shape."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dim() == 4:
            continue
        found = list(tensor.shape) if isinstance(tensor, Tensor) else f"an object of {type(tensor).__name__}"
        raise ModelError(f"attention was given a {name} {found}: give a tensor [rows, heads, length, size].")
    if not isinstance(causal, bool):
        raise ModelError(f"attention was given causal = {causal!r}: give True or False.")
    query, key = tensors["query"], tensors["key"]
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    if query.shape[1] % max(key.shape[1], 1):
        raise ModelError(
            f"attention was given {query.shape[1]} query heads and {key.shape[1]} of keys: give a multiple."
        )
    if causal and query.shape[2] != key.shape[2]:
        raise ModelError(
            f"attention was given a query of {query.shape[2]} positions and a key of {key.shape[2]}, and a "
            "causal mask, which needs as many: give causal=False where each query may see all keys."
        )
    for name, number in numbers.items():
        kinds = (Integral,) if name == "window" else (Real, Tensor)
        if number is not None and (not isinstance(number, kinds) or isinstance(number, bool)):
            raise ModelError(f"attention was given {name} = {number!r}: give a number, or None.")
        if isinstance(number, Tensor) and number.requires_grad:
            raise ModelError(
                f"attention was given a {name} that needs a gradient, which it would not get: give a number, "
                "and multiply the query by what the model is to learn."
            )
    if documents is not None and not isinstance(documents, Tensor):
        raise ModelError(
            f"attention was given documents, an object of {type(documents).__name__}: give a tensor of ids "
            "[rows, length], or None."
        )
    if dropout is not None and not (
        isinstance(dropout, nn.Module) and isinstance(getattr(dropout, "p", None), Real)
    ):
        raise ModelError(
            f"attention was given dropout = {dropout!r}: give a module with a probability p, such as "
            "plait.Dropout(p), or None."
        )


def _require_mask(dropout: AnyDropout | None) -> None:
    """Raise ModelError for a dropout whose mask is not known by position, as attention in blocks needs it."""
    if dropout is not None and not isinstance(dropout, AnyDropout):
        raise ModelError(
            f"attention was given the dropout {type(dropout).__name__}, whose mask is not known by position, "
            "as context parallelism, packed documents and a softcap need it: give plait.Dropout(p)."
        )


def _require_sinks(sinks: object, query: Tensor) -> None:
    """Raise ModelError for sinks that are not a score of each of the query's heads."""
    if not (isinstance(sinks, Tensor) and sinks.shape == query.shape[1:2]):
        found = list(sinks.shape) if isinstance(sinks, Tensor) else f"an object of {type(sinks).__name__}"
        raise ModelError(
            f"attention was given sinks {found} for {query.shape[1]} query heads: give a tensor [heads], or "
            "None."
        )


@dataclass(frozen=True)
class SharedKeys:
    """Keys and values for a call of `attend`, sent or being sent to other ranks of `cp`, by `share_keys`."""

    key: Tensor
    value: Tensor
    mask: Mask
    sequence: LocalSequence | None
    exchange: KeyExchange | None
    query_heads: int
    """The number of heads that the query must have."""


@Replaceable
@positions_may_mix(2, "key", "value")
def share_keys(
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    *,
    query_heads: int,
) -> SharedKeys:
    """Send keys and values to the ranks of `cp` that need them; return them for one call of `attend`.

    `query_heads`: the number of heads of the query. With ring attention the keys are on their way when it
    returns, with Ulysses they have arrived. The result is to be passed to `attend`, once. Communication over
    `cp`: one all-to-all, and one of gradients in the backward.
    """
    mask = Mask(causal, window)
    sequence = _sequence_of(key, documents, mask)
    if sequence is None or TRACE.get() is not None:
        return SharedKeys(key, value, mask, sequence, None, query_heads)
    _require_keys(key, value, sequence, query_heads)
    kv_heads, ranks = key.shape[1], sequence.group.size
    if ranks > 1 and method_choice(sequence, query_heads, kv_heads).method == "ulysses":
        of_ranks = heads_of_ranks(query_heads, kv_heads, ranks)
        key, value = (
            evenly_shared(one, query_heads, kv_heads, ranks, sequence.group.index)
            for one in to_heads(sequence, of_ranks, key, value)
        )
        return SharedKeys(key, value, mask, sequence, None, query_heads)
    exchange = KeyExchange(sequence, mask, key.device)
    if ranks > 1:
        key, value = share(key, value, exchange)
    return SharedKeys(key, value, mask, sequence, exchange, query_heads)


@Replaceable
@positions_may_mix(2, "query")
def attend(
    query: Tensor,
    keys: SharedKeys,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: AnyDropout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of `query` to the keys and values that `share_keys` returned.

    Communication over `cp`: with "ring" one all-to-all in the backward unless keys are kept; with "ulysses"
    two, and two in the backward.
    """
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    dropout, trace = dropout if is_active(dropout) else None, TRACE.get()
    if sinks is not None:
        _require_sinks(sinks, query)
    in_blocks = keys.sequence is not None or softcap is not None or sinks is not None
    # scaled_dot_product_attention has no fused kernel of a CPU for these.
    in_blocks = in_blocks or (keys.value.shape[3] < keys.key.shape[3] and not is_accelerator(query))
    if in_blocks:
        _require_mask(dropout)
        if trace is not None:
            return _recorded(trace, query, keys, Scaling(scale, softcap), sinks, dropout)
        keys = _in_blocks(keys, softcap)
    sequence, heads, scaling = keys.sequence, query.shape[1], Scaling(scale, softcap)
    if sequence is None and dropout is not None:
        given = query, keys.key, keys.value, keys.mask.causal, scale, dropout
        return with_kept_operations(lambda: attention_with_dropout(*given))
    if sequence is None:
        compute = functional.scaled_dot_product_attention
        plain = partial(compute if heads == keys.key.shape[1] else grouped_attention, scale=scale)
        causal = keys.mask.causal
        return with_kept_operations(lambda: plain(query, keys.key, keys.value, is_causal=causal))
    rows = keys.key.shape[0]
    if query.shape[:3] != (rows, keys.query_heads, sequence.size):
        raise ModelError(
            f"attention was given a query {list(query.shape)} for keys of {rows} rows, {keys.query_heads} "
            f"query heads and {sequence.size} positions: give it [rows, heads, length, size] of the same."
        )
    dropout_mask = None
    if dropout is not None:
        dropout_mask = WeightDropoutMask.next(dropout, query, sequence.layout.length)
    if keys.exchange is not None:
        blocks = KeyBlocks(keys.exchange, scaling, dropout_mask)
        output = attend_to_all(query, keys.key, keys.value, sinks, blocks)
    else:
        of_ranks = heads_of_ranks(heads, heads, sequence.group.size)
        own = of_ranks[sequence.group.index]
        if dropout_mask is not None:
            dropout_mask = dropout_mask.from_head(own[0])
        if sinks is not None:
            sinks = sinks[own[0] : own[-1] + 1]
        (mine,) = to_heads(sequence, of_ranks, query)
        blocks = KeyBlocks(KeyExchange(_whole(sequence), keys.mask, query.device), scaling, dropout_mask)
        output = attend_by_heads(mine, keys.key, keys.value, sinks, blocks, sequence, of_ranks)
    # The proof of tensor parallelism looks for dropouts.
    return tag_dropout(output, dropout) if isinstance(dropout, Dropout) else output


def _recorded(
    trace: LayerTrace,
    query: Tensor,
    keys: SharedKeys,
    scaling: Scaling,
    sinks: Tensor | None,
    dropout: AnyDropout | None,
) -> Tensor:
    """Return a tensor in place of attention that a compiled layer computes between its graphs."""
    rows, heads, length, _ = query.shape
    width = keys.value.shape[3]
    # Heads lie within positions: that is how kernels return it, and how the next linear reads it.
    stride = length * heads * width, width, heads * width, 1
    given = [query, keys.key, keys.value, *(() if sinks is None else (sinks,))]
    (output,) = trace.call(
        partial(_outside_graphs, keys.mask, scaling),
        dropout,
        given,
        [TensorForm((rows, heads, length, width), stride, query.dtype)],
        once=dropout is not None,
    )
    return output


def _outside_graphs(
    mask: Mask,
    scaling: Scaling,
    dropout: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
) -> tuple[Tensor]:
    """Return attention that a compiled layer has recorded, on the sequence that runs now."""
    assert dropout is None or isinstance(dropout, AnyDropout)
    keys = share_keys(key, value, mask.causal, mask.window, query_heads=query.shape[1])
    return (attend(query, keys, scale=scaling.scale, softcap=scaling.softcap, dropout=dropout, sinks=sinks),)


def _in_blocks(keys: SharedKeys, softcap: float | None) -> SharedKeys:
    """Return `keys` with what `attend` needs to compute attention block by block.

    Raises ModelError for a cap that is not above 0 and finite.
    """
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ModelError(f"attention was given softcap = {softcap:g}: give a bound above 0, or None.")
    if keys.sequence is not None:
        return keys
    sequence = ContextParallelism.of_one_rank().sequence(keys.key.shape[2])
    exchange = KeyExchange(sequence, keys.mask, keys.key.device)
    return replace(keys, sequence=sequence, exchange=exchange)


def _sequence_of(key: Tensor, documents: Tensor | None, mask: Mask) -> LocalSequence | None:
    """Return the sequence on which the layer works; None where plain causal or full attention suffices.

    In a layer that is traced also a running sequence without documents: in another step it may have some.
    """
    sequence, is_traced = running_sequence(), TRACE.get() is not None
    if documents is not None:
        sequence = _with_documents(sequence, documents, key.is_meta)
    if sequence is None and mask.window is not None:
        sequence = ContextParallelism.of_one_rank().sequence(key.shape[2])
    if sequence is not None and sequence.group.size == 1:
        needs_mask = mask.window is not None and mask.window < key.shape[2]
        return sequence if needs_mask or sequence.packed is not None or is_traced else None
    return sequence


def _require_keys(key: Tensor, value: Tensor, sequence: LocalSequence, query_heads: int) -> None:
    """Raise ModelError unless keys and values are those of `sequence` and divide the query heads."""
    if key.shape[2] != sequence.size:
        raise ModelError(
            f"attention was given keys {list(key.shape)} of {key.shape[2]} positions, where this rank has "
            f"{sequence.size} of the {sequence.layout.length} positions of the sequence: give it all of a "
            "layer's positions, in their order."
        )
    if value.shape[:3] != key.shape[:3]:
        raise ModelError(
            f"attention was given keys {list(key.shape)} and values {list(value.shape)}: give both the same "
            "rows, heads and positions."
        )
    if query_heads % max(1, key.shape[1]):
        raise ModelError(
            f"attention was given {query_heads} query heads for {key.shape[1]} heads of keys: give a "
            "multiple."
        )
    if sequence.documents is not None and len(sequence.documents.starts) != key.shape[0]:
        raise ModelError(
            f"attention was given keys {list(key.shape)} of {key.shape[0]} rows, but document ids of "
            f"{len(sequence.documents.starts)} rows: give ids for each row."
        )


def _with_documents(sequence: LocalSequence | None, documents: Tensor, on_meta: bool) -> LocalSequence:
    if documents.dim() != 2 or documents.is_floating_point():
        raise ModelError(
            f"attention was given documents of {documents.dtype} {list(documents.shape)}: give whole numbers "
            "[rows, length]."
        )
    if documents.is_meta or on_meta:  # there, rows and length are others than those of a step
        raise ModelError(
            "attention was given documents that a layer computes or keeps, which have no values on the meta "
            "device: give document_ids in the batch of the engine instead."
        )
    if sequence is not None and documents.shape[1] != sequence.layout.length:
        raise ModelError(
            f"attention was given documents {list(documents.shape)}, where sequences have "
            f"{sequence.layout.length} positions: give ids of the whole sequences."
        )

    def bounds() -> DocumentBounds:
        return document_bounds(documents.cpu())

    if sequence is None:
        return ContextParallelism.of_one_rank().sequence(documents.shape[1], bounds())

    def compute() -> tuple[Tensor, LocalSequence]:  # the tensor, too, so that no other has its id
        return documents, LocalSequence(sequence.parallelism, sequence.layout, bounds())

    return sequence.result(("documents", id(documents)), compute)[1]


def _whole(sequence: LocalSequence) -> LocalSequence:
    """Return the whole sequence as one rank holds it."""

    def compute() -> LocalSequence:
        alone = replace(ContextParallelism.of_one_rank(), overlap=sequence.parallelism.overlap)
        return alone.sequence(sequence.layout.length, sequence.documents)

    return sequence.result("whole", compute)
