"""Operations that a compiled layer runs outside its graphs, as without compilation.

While a layer is traced, `TRACE` holds its `LayerTrace`. Such an operation is then not run but recorded, as an
operator with a number, of which the trace knows only the shapes of the results. The layer's graphs end before
such an operator and begin after it.

    collectives        over `tp` and `cp`
    autograd calls     attention on a part of a sequence, on documents, in a window, with a softcap or with
                       sinks; the choice of experts, and the experts: autograd runs their backward
    before the graphs  what differs from step to step: dropout masks, positions of packed documents
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.tensor.autograd.float8_inputs import carrier_like, sum_of_gradients
from plait.tensor.autograd.regathered_activations import Gather

Operation = Callable[[Tensor], Tensor]

torch.library.define("plait::eager_operation", "(Tensor input, int number, SymInt[] shape) -> Tensor")
torch.library.define("plait::regathered", "(Tensor part, int number) -> Tensor")
torch.library.define("plait::dropout_mask", "(int number, SymInt[] shape, Device device) -> Tensor")
torch.library.define("plait::positions", "(SymInt[] shape, Device device) -> Tensor")
torch.library.define(
    "plait::autograd_call",
    "(Tensor[] inputs, int number, bool once, int[][] shapes, int[][] strides, ScalarType[] dtypes)"
    " -> Tensor[]",
)
torch.library.define(
    "plait::autograd_call_backward",
    "(Tensor[] gradients, Tensor run, int inputs, int[][] shapes, int[][] strides, ScalarType[] dtypes)"
    " -> Tensor[]",
)
EAGER_OPERATION: Any = torch.ops.plait.eager_operation.default
"""Operator for a recorded operation; `number` is that of the operation in the trace."""
REGATHERED: Any = torch.ops.plait.regathered.default
"""Operator for the result of a recorded gather that weight gradients gather again; no trace has it."""
DROPOUT_MASK: Any = torch.ops.plait.dropout_mask.default
"""Operator for the mask of a dropout's call; `number` is that of the call in the trace."""
POSITIONS: Any = torch.ops.plait.positions.default
"""Operator for the positions of the running sequence."""
AUTOGRAD_CALL: Any = torch.ops.plait.autograd_call.default
"""Operator for a recorded `AutogradCall`; `number` is that of the call in the trace. Its last result stands
for what the backward needs. `once`: the backward must not repeat the call."""
AUTOGRAD_CALL_BACKWARD: Any = torch.ops.plait.autograd_call_backward.default
"""Operator for the gradients of a recorded `AutogradCall`: of as many `inputs` as need one; behind them are
those of its module's parameters, in place of which nothing is computed: they are added to their buffers."""


def _like_eager_operation(input: Tensor, number: int, shape: Sequence[int]) -> Tensor:
    return input.new_empty(shape)


def _like_dropout_mask(number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def _like_positions(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device)


def _like_autograd_call(
    inputs: Sequence[Tensor],
    number: int,
    once: bool,
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    forms = zip(shapes, strides, dtypes, strict=True)
    return [inputs[0].new_empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in forms]


def _like_autograd_call_backward(
    gradients: Sequence[Tensor],
    run: Tensor,
    inputs: int,
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    return _like_autograd_call(gradients, 0, False, shapes, strides, dtypes)


torch.library.register_fake("plait::eager_operation", _like_eager_operation)
torch.library.register_fake("plait::dropout_mask", _like_dropout_mask)
torch.library.register_fake("plait::positions", _like_positions)
torch.library.register_fake("plait::autograd_call", _like_autograd_call)
torch.library.register_fake("plait::autograd_call_backward", _like_autograd_call_backward)


class TensorForm(NamedTuple):
    """The shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorForm:
        """Return the form of a contiguous tensor."""
        stride, size = list[int](), 1
        for length in reversed(shape):
            stride.insert(0, size)
            size *= max(length, 1)
        return TensorForm(tuple(shape), tuple(stride), dtype)

    @staticmethod
    def like(tensor: Tensor) -> TensorForm:
        """Return the form of `torch.empty_like(tensor)`."""
        made = torch.empty_like(tensor)
        return TensorForm(tuple(made.shape), made.stride(), made.dtype)


@dataclass(frozen=True)
class AutogradCall:
    """A call that was recorded while its layer was traced, and whose backward is autograd's."""

    compute: Callable[..., Sequence[Tensor]]
    """Returns the results for `module` and the inputs, with an autograd graph if gradients are enabled."""
    module: str | None
    """The name in the layer of the module that `compute` is given; None: it is given None."""
    learns: tuple[bool, ...]
    """Whether each input needs a gradient."""
    has_parameters: bool
    """Whether the backward adds gradients to parameters of the layer."""


@dataclass(frozen=True)
class RecordedPair:
    """An operation of a layer and the operation of its gradient; None: the tensor passes unchanged."""

    forward: Operation | None
    backward: Operation | None = None
    writes: bool = False
    """Whether `forward` may write to its input."""
    regather: Gather | None = None
    """The gather that `forward` is, if weight gradients are to gather its result again."""


@dataclass
class LayerTrace:
    """The operations and calls that a layer runs outside its graphs, recorded while it is traced."""

    names: Mapping[int, str]
    """Each module's name in the layer, by its `id`."""
    operations: list[Operation] = field(default_factory=list)
    writes: set[int] = field(default_factory=set)
    """Numbers of operations that write to their input."""
    gathers: dict[int, Gather] = field(default_factory=dict)
    """By the number of an operation: the gather that it is, where weight gradients are to gather again."""
    elementwise: dict[int, Hashable] = field(default_factory=dict)
    """By the number of an operation on each element: operations of equal values may run as one, on several
    tensors of one dtype."""
    masks: list[str] = field(default_factory=list)
    """Per mask the name of its dropout."""
    calls: list[AutogradCall] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    """What each call of the layer runs first, as the running sequence's documents may not fit."""

    def record(self, input: Tensor, shape: Sequence[int], pair: RecordedPair) -> Tensor:
        """Record operations; return a tensor of `shape` in place of the result of `pair.forward`."""
        numbers = self._numbers(pair)
        recorded: Tensor = _Recorded.apply(input, tuple(shape), *numbers)  # type: ignore[no-untyped-call]
        return recorded

    def record_with_carrier(
        self, input: Tensor, shape: Sequence[int], pair: RecordedPair
    ) -> tuple[Tensor, Tensor]:
        """Record as `record`; return also a carrier, a placeholder whose gradient may be in fp32."""
        numbers = self._numbers(pair)
        made: tuple[Tensor, Tensor]
        made = _RecordedWithCarrier.apply(input, tuple(shape), *numbers)  # type: ignore[no-untyped-call]
        return made

    def gathered(self, gather: Gather, part: Tensor, *, regathers: bool) -> Tensor:
        """Record the all-gather of `part`, without a backward; return a tensor in place of the whole.

        `regathers`: whether weight gradients are to gather it again.
        """
        (number,) = self.numbers(gather.whole)
        if regathers:
            self.gathers[number] = gather
        whole: Tensor = EAGER_OPERATION(part, number, gather.whole_shape(part))
        return whole

    def carrier_of(self, part: Tensor, shape: Sequence[int], backward: Operation) -> Tensor:
        """Return a carrier (placeholder) of `shape`; record `backward`, from its gradient to `part`'s."""
        carrier: Tensor = _RecordedCarrier.apply(part, tuple(shape), *self.numbers(backward))  # type: ignore[no-untyped-call]
        return carrier

    def numbers(self, *operations: Operation) -> tuple[int, ...]:
        """Record operations, and return the numbers by which `EAGER_OPERATION` calls them."""
        first = len(self.operations)
        self.operations += operations
        return tuple(range(first, len(self.operations)))

    def _numbers(self, pair: RecordedPair) -> tuple[int | None, int | None]:
        """Record the operations of a pair, and return their numbers."""
        (there,) = (None,) if pair.forward is None else self.numbers(pair.forward)
        (back,) = (None,) if pair.backward is None else self.numbers(pair.backward)
        if pair.writes and there is not None:
            self.writes.add(there)
        if pair.regather is not None and there is not None:
            self.gathers[there] = pair.regather
        return there, back

    def dropout_mask(self, module: nn.Module, shape: Sequence[int], device: torch.device) -> Tensor:
        """Record a dropout's call, and return a tensor in place of its mask: bool, of `shape`."""
        self.masks.append(self.names[id(module)])
        mask: Tensor = DROPOUT_MASK(len(self.masks) - 1, shape, device)
        return mask

    def positions(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return a tensor in place of the running sequence's positions: int64, of `shape`."""
        found: Tensor = POSITIONS(shape, device)
        return found

    def call(
        self,
        compute: Callable[..., Sequence[Tensor]],
        module: nn.Module | None,
        inputs: Sequence[Tensor],
        results: Sequence[TensorForm],
        *,
        parameters: Sequence[Tensor] = (),
        once: bool = False,
    ) -> tuple[Tensor, ...]:
        """Record `compute(module, *inputs)`, and return tensors in place of its results.

        `parameters`: those that `compute` reads, whose gradients it queues, or leaves in their `.grad`.
        `once`: recomputation does not repeat the call.
        """
        name = None if module is None else self.names[id(module)]
        learns = tuple(one.requires_grad for one in inputs)
        self.calls.append(AutogradCall(compute, name, learns, bool(parameters)))
        call = len(self.calls) - 1, once, tuple(results), len(inputs)
        made: tuple[Tensor, ...] = _RecordedCall.apply(*call, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return made


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


class _RecordedWithCarrier(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: tuple[int, ...], there: int | None, back: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.back, ctx.shape, ctx.dtype = back, tuple(input.shape), input.dtype
        result: Tensor = input.view_as(input) if there is None else EAGER_OPERATION(input, there, shape)
        return result, carrier_like(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        total = sum_of_gradients(*gradients)
        found = None if total is None else EAGER_OPERATION(total, ctx.back, ctx.shape).to(ctx.dtype)
        return found, None, None, None


class _RecordedCarrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: tuple[int, ...], back: int) -> Tensor:
        ctx.back, ctx.shape, ctx.dtype = back, tuple(part.shape), part.dtype
        return carrier_like(part, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return EAGER_OPERATION(gradient, ctx.back, ctx.shape).to(ctx.dtype), None, None


class _RecordedCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, number: int, once: bool, results: Sequence[TensorForm], inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """`tensors`: the inputs, and parameters, so that a backward runs if only these need a gradient."""
        run = TensorForm.contiguous((0,), tensors[0].dtype)
        *made, saved = AUTOGRAD_CALL(tensors[:inputs], number, once, *_columns([*results, run]))
        ctx.save_for_backward(saved)
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        ctx.learns = [one.is_floating_point() for one in made]
        ctx.inputs = sum(ctx.needs_input_grad[4 : 4 + inputs])
        ctx.forms = [
            TensorForm.like(one) for one, need in zip(tensors, ctx.needs_input_grad[4:], strict=True) if need
        ]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (run,) = ctx.saved_tensors
        given = [one for one, learns in zip(gradients, ctx.learns, strict=True) if learns]
        found = iter(AUTOGRAD_CALL_BACKWARD(given, run, ctx.inputs, *_columns(ctx.forms)))
        return (None,) * 4 + tuple(next(found) if need else None for need in ctx.needs_input_grad[4:])


def _columns(forms: Sequence[TensorForm]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the shapes, the strides and the dtypes of several tensors."""
    return [one.shape for one in forms], [one.stride for one in forms], [one.dtype for one in forms]
