"""`OperationRecorder`: the operations and collectives of a layer, recorded while it runs on the meta device.

A trace of a layer runs its forward, the backward of its input and that of its weights once each; the recorder
sees every ATen operation of them, and every collective over the groups that report to it. Timed, they are
the layer's work for one micro-batch, whatever the layer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.estimate.memory.aten_operations import operations_of
from plait.estimate.time.layer_work import LayerWork, Recomputation
from plait.estimate.time.operation_times import (
    AxisTransfer,
    Collective,
    DeviceOperation,
    FusedAttention,
    Product,
)
from plait.plan.plan import Recompute
from plait.ranks.group import Group, Traffic
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN

Phase = Literal["forward", "backward", "weights", "recomputation"]
"""A part of a layer's run; `recomputation`: what the backward runs again of the forward."""
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ring": "ring",
}


class OperationRecorder(TorchDispatchMode):
    """Records what layers compute, and send over groups of `group_on_meta`, one layer after another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase: Phase | None = None
        self._forget()

    def _forget(self) -> None:
        self._operations: dict[Phase, list[DeviceOperation]] = {phase: [] for phase in get_args(Phase)}
        self._transfers: dict[Phase, list[AxisTransfer]] = {phase: [] for phase in get_args(Phase)}
        self._gathered: set[int] = set()
        """The storages of which the backward has gathered the other ranks' parts."""

    @contextmanager
    def recording(self, phase: Phase) -> Iterator[None]:
        """Record all operations within the context as those of a phase."""
        self._phase = phase
        try:
            with self:
                yield
        finally:
            self._phase = None

    def take(self, recompute: Recompute = "none") -> LayerWork:
        """Return the work of the layer that has run, and forget it; `recompute`: the mode in which it ran."""
        operations = {phase: tuple(found) for phase, found in self._operations.items()}
        over_tp, over_cp = self._over("tp"), self._over("cp")
        again = Recomputation(operations["recomputation"], over_tp["recomputation"], over_cp["recomputation"])
        gathers = tuple(one for one in over_tp["backward"] if one.collective == "all-gather")
        sums = tuple(one for one in over_tp["backward"] if one.collective != "all-gather")
        self._forget()
        return LayerWork(
            forward=operations["forward"],
            backward=operations["backward"],
            weights=operations["weights"],
            selective=again if recompute == "selective" else Recomputation(),
            full=again if recompute == "full" else Recomputation(),
            forward_transfers=over_tp["forward"],
            backward_gathers=gathers,
            backward_transfers=over_tp["weights"] + sums,
            forward_exchanges=over_cp["forward"],
            backward_exchanges=over_cp["backward"],
        )

    def assume_backward(self) -> None:
        """Record the backward that the forward's operations have, where it does not run on the meta device.

        A product has one with each of its factors transposed; one with a weight is the weight's gradient.
        """
        backward: list[DeviceOperation] = []
        weights: list[DeviceOperation] = []
        for operation in reversed(self._operations["forward"]):
            if isinstance(operation, Product):
                m, n, k = operation.m, operation.n, operation.k
                backward.append(replace(operation, n=k, k=n))
                (weights if operation.batch == 1 else backward).append(replace(operation, m=n, n=k, k=m))
            elif isinstance(operation, FusedAttention):
                backward.append(replace(operation, backward=True))
            else:
                backward.append(operation)
        self._operations["backward"], self._operations["weights"] = backward, weights

    def collective(self, group: Group, kind: str, tensor: Tensor) -> None:
        """Record a collective of `tensor`, this rank's input, over a group; `kind`: of `COLLECTIVES`."""
        if self._phase is None or not tensor.nbytes:
            return
        phase, memory = self._current(), id(tensor.untyped_storage())
        if kind == "all_gather" and phase == "backward":
            self._gathered.add(memory)
        elif kind == "all_gather" and phase == "weights" and memory in self._gathered:
            return  # of the output's gradient, which is still whole where weights follow the input at once
        nbytes: float = tensor.nbytes
        if kind in ("all_gather", "all_to_all"):
            nbytes *= group.size
        elif kind == "ring":
            nbytes /= group.size - 1
        axis: Any = group.name
        self._transfers[phase].append(AxisTransfer(COLLECTIVES[kind], axis, nbytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run `func`, and record what it computes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, recorded = func.overloadpacket.__name__, self._operations[self._current()]
        if name == "add_" and recorded and _is_result(recorded[-1], args[0], args[1]):
            # A GPU multiplies into the gradient.
            recorded[-1] = replace(recorded[-1], result_bytes=2 * args[0].itemsize)
        else:
            recorded.extend(operations_of(name, args, kwargs, result))
        return result

    def _current(self) -> Phase:
        """Return the phase in progress, or within a backward the recomputation."""
        run = RECOMPUTED_RUN.get()
        assert self._phase is not None
        return "recomputation" if run is not None and run.is_second else self._phase

    def _over(self, axis: str) -> dict[Phase, tuple[AxisTransfer, ...]]:
        """Return the transfers over an axis, by phase."""
        return {
            phase: tuple(one for one in found if one.axis == axis) for phase, found in self._transfers.items()
        }


def group_on_meta(axis: str, size: int, index: int, recorder: OperationRecorder | None) -> Group:
    """Return a group for layers on the meta device, of ranks that do not exist, recorded by `recorder`."""
    on_skip = None if recorder is None else recorder.collective
    return Group(axis, tuple(range(size)), index, None, Traffic(), 0.0, on_skip=on_skip)


def recording(recorder: OperationRecorder | None, phase: Phase) -> AbstractContextManager[None]:
    """Return the context in which a recorder, if there is one, records a phase."""
    return nullcontext() if recorder is None else recorder.recording(phase)


def with_loss(layer: LayerWork, loss: LayerWork) -> LayerWork:
    """Return the work of the last layer together with that of the loss."""
    return replace(
        layer,
        forward=layer.forward + loss.forward,
        backward=loss.backward + layer.backward,
        forward_transfers=layer.forward_transfers + loss.forward_transfers,
        backward_transfers=loss.backward_transfers + layer.backward_transfers,
    )


def _is_result(last: DeviceOperation, total: Tensor, added: Any) -> bool:
    """Return whether `added` to `total` is the result of the last operation, a matrix product."""
    return (
        isinstance(last, Product)
        and last.batch == 1
        and isinstance(added, Tensor)
        and added.shape == total.shape == (last.m, last.n)
    )
