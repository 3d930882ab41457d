"""Operations that a compiled layer runs outside its graphs: collectives, attention, dropout masks, positions.

While a layer is traced, `TRACE` holds its `LayerTrace`. A collective is then not run but recorded, as an
operator with a number, of which the trace knows only the shape of the result. The layer's graphs end before
such an operator and begin after it; what it stands for runs between them, as without compilation. So does
attention on a part of a sequence, on documents, in a window, with a softcap or with sinks. What differs from
step to step, masks and the positions of packed documents, is made before the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensor.autograd.regather import Gather

Operation = Callable[[Tensor], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, nn.Module | None], Tensor]
"""Returns attention `[rows, heads, length, width]` for a query, keys, values, sinks and a dropout of the
weights."""

torch.library.define("plait::eager_operation", "(Tensor input, int number, SymInt[] shape) -> Tensor")
torch.library.define("plait::regathered", "(Tensor part, int number) -> Tensor")
torch.library.define("plait::dropout_mask", "(int number, SymInt[] shape, Device device) -> Tensor")
torch.library.define("plait::positions", "(SymInt[] shape, Device device) -> Tensor")
torch.library.define(
    "plait::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, int number, bool drops) -> (Tensor, Tensor)",
)
torch.library.define(
    "plait::attention_backward",
    "(Tensor gradient, Tensor run, SymInt[] q, SymInt[] k, SymInt[] v, int sinks)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
EAGER_OPERATION: Any = torch.ops.plait.eager_operation.default
"""Operator for a recorded operation; `number` is that of the operation in the trace."""
REGATHERED: Any = torch.ops.plait.regathered.default
"""Operator for the result of a recorded gather that weight gradients gather again; no trace has it."""
DROPOUT_MASK: Any = torch.ops.plait.dropout_mask.default
"""Operator for the mask of a dropout's call; `number` is that of the call in the trace."""
POSITIONS: Any = torch.ops.plait.positions.default
"""Operator for the positions of the running sequence."""
ATTENTION: Any = torch.ops.plait.attention.default
"""Operator for recorded attention; its second result stands for what the backward needs. `drops`: whether
weights pass through a dropout."""
ATTENTION_BACKWARD: Any = torch.ops.plait.attention_backward.default
"""Operator for the gradients of a recorded attention's query, keys, values and sinks, perhaps none."""


def _like_eager_operation(input: Tensor, number: int, shape: Sequence[int]) -> Tensor:
    return input.new_empty(shape)


def _like_dropout_mask(number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def _like_positions(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device)


def _like_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, number: int, drops: bool
) -> tuple[Tensor, Tensor]:
    return _by_positions(q, (*q.shape[:3], v.shape[3])), q.new_empty(0)


def _like_attention_backward(
    gradient: Tensor, run: Tensor, q: Sequence[int], k: Sequence[int], v: Sequence[int], sinks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (_by_positions(gradient, one) for one in (q, k, v))
    return of_query, of_key, of_value, gradient.new_empty(sinks)


def _by_positions(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor `[rows, heads, length, width]` in whose memory heads lie within positions.

    That is how kernels of attention return it, and how the next linear reads it.
    """
    rows, heads, length, width = shape
    return like.new_empty((rows, length, heads, width)).transpose(1, 2)


torch.library.register_fake("plait::eager_operation", _like_eager_operation)
torch.library.register_fake("plait::dropout_mask", _like_dropout_mask)
torch.library.register_fake("plait::positions", _like_positions)
torch.library.register_fake("plait::attention", _like_attention)
torch.library.register_fake("plait::attention_backward", _like_attention_backward)


@dataclass(frozen=True)
class RecordedAttention:
    """A call of attention that was recorded while its layer was traced for compilation."""

    attention: Attention
    dropout: str | None
    """The name in the layer of the dropout of its weights."""
    learns: tuple[bool, ...]
    """Whether the query, the keys, the values and the sinks, if there are any, need a gradient."""


@dataclass
class LayerTrace:
    """What a layer calls outside its graphs, recorded while it is traced: collectives, attention, masks."""

    names: Mapping[int, str]
    """Each dropout's name in the layer, by the module's `id`."""
    operations: list[Operation] = field(default_factory=list)
    writes: set[int] = field(default_factory=set)
    """Numbers of operations that write to their input."""
    gathers: dict[int, Gather] = field(default_factory=dict)
    """By the number of an operation: the gather that it is, where weight gradients are to gather again."""
    masks: list[str] = field(default_factory=list)
    """Per mask the name of its dropout."""
    attentions: list[RecordedAttention] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    """What each call of the layer runs first, as the running sequence's documents may not fit."""

    def record(
        self,
        input: Tensor,
        shape: Sequence[int],
        forward: Operation | None,
        backward: Operation | None,
        *,
        writes: bool = False,
        regather: Gather | None = None,
    ) -> Tensor:
        """Record `forward` and its `backward`; return a tensor of `shape` in place of the result.

        None returns the tensor as it is. `writes`: `forward` may write to its input. `regather`: the gather
        that `forward` is, if weight gradients are to gather its result again.
        """
        numbers: list[int | None] = []
        for operation in (forward, backward):
            numbers.append(None if operation is None else len(self.operations))
            if operation is not None:
                self.operations.append(operation)
        if writes and numbers[0] is not None:
            self.writes.add(numbers[0])
        if regather is not None and numbers[0] is not None:
            self.gathers[numbers[0]] = regather
        recorded: Tensor = _Recorded.apply(input, tuple(shape), *numbers)  # type: ignore[no-untyped-call]
        return recorded

    def dropout_mask(self, module: nn.Module, shape: Sequence[int], device: torch.device) -> Tensor:
        """Record a dropout's call, and return a tensor in place of its mask: bool, of `shape`."""
        self.masks.append(self.names[id(module)])
        mask: Tensor = DROPOUT_MASK(len(self.masks) - 1, shape, device)
        return mask

    def positions(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return a tensor in place of the running sequence's positions: int64, of `shape`."""
        found: Tensor = POSITIONS(shape, device)
        return found

    def attention(
        self,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        dropout: nn.Module | None,
    ) -> Tensor:
        """Record `attention` of these arguments, and return a tensor in place of the result."""
        name = None if dropout is None else self.names[id(dropout)]
        given = query, key, value, sinks
        learns = tuple(one.requires_grad for one in given if one is not None)
        self.attentions.append(RecordedAttention(attention, name, learns))
        arguments = *given, len(self.attentions) - 1, dropout is not None
        recorded: Tensor = _RecordedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
        return recorded


TRACE: ContextVar[LayerTrace | None] = ContextVar("plait_layer_trace", default=None)
"""The trace of the layer that is being traced; None while layers run."""


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: tuple[int, ...], there: int | None, back: int | None
    ) -> Tensor:
        ctx.back, ctx.shape = back, tuple(input.shape)
        result: Tensor = input.view_as(input) if there is None else EAGER_OPERATION(input, there, shape)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.back is not None:
            gradient = EAGER_OPERATION(gradient, ctx.back, ctx.shape)
        return gradient, None, None, None


class _RecordedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        number: int,
        drops: bool,
    ) -> Tensor:
        output, run = ATTENTION(query, key, value, sinks, number, drops)
        ctx.save_for_backward(run)
        ctx.sinks = 0 if sinks is None else len(sinks)
        ctx.shapes = tuple(tuple(one.shape) for one in (query, key, value))
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (run,) = ctx.saved_tensors
        *found, of_sinks = ATTENTION_BACKWARD(gradient, run, *ctx.shapes, ctx.sinks)
        return *found, of_sinks if ctx.sinks else None, None, None
