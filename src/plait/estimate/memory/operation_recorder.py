"""`OperationRecorder`: the operations and collectives of a layer, recorded while it runs on the meta device.

A trace of a layer runs its forward, the backward of its input and that of its weights once each; the recorder
sees every ATen operation of them, and every collective over the groups that report to it. Timed, they are
the layer's work for one micro-batch, whatever the layer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, get_args
from weakref import ref

import torch
from torch import Tensor

from plait.estimate.memory.aten_operations import Access, accesses_of, operations_of
from plait.estimate.memory.remembered_results import Observer, RememberedResults, operation_name
from plait.estimate.time.kernel_fusion import Phase, Range, RecordedOperation, fused
from plait.estimate.time.layer_work import LayerWork, Recomputation
from plait.estimate.time.operation_times import AxisTransfer, DeviceOperation, FusedAttention, Product
from plait.plan.plan import Recompute
from plait.ranks.group import Group, Traffic
from plait.tensor.autograd.kept_results import RECOMPUTED_RUN


class OperationRecorder:
    """Records the operations and collectives of layers that run on meta, one layer after another."""

    def __init__(self, *, fuses: bool = False) -> None:
        """`fuses`: whether element-wise operations between products are one kernel: see `kernel_fusion`."""
        self.fuses = fuses
        self._phase: Phase | None = None
        self._storages: dict[int, tuple[ref[torch.UntypedStorage], int]] = {}
        self._count = 0
        """The number of storages seen so far."""
        self._forget()

    def _forget(self) -> None:
        self._operations: dict[Phase, list[RecordedOperation]] = {phase: [] for phase in get_args(Phase)}
        self._transfers: dict[Phase, list[AxisTransfer]] = {phase: [] for phase in get_args(Phase)}
        self._assumes_backward = False
        self._gathered: set[int] = set()
        """The storages of which the backward has gathered the other ranks' parts."""

    @contextmanager
    def recording(self, phase: Phase, *others: Observer) -> Iterator[None]:
        """Return a context that records ATen operations under `phase`, and calls `others` after each."""
        self._phase = phase
        try:
            with RememberedResults(self._record, *others):
                yield
        finally:
            self._phase = None

    def take(self, recompute: Recompute = "none", *, fuses: bool | None = None) -> LayerWork:
        """Return the recorded operations and collectives of the layer that has run, and forget them.

        `recompute`: how it ran. `fuses`: instead of the recorder's.
        """
        if self.fuses if fuses is None else fuses:
            operations = fused(self._operations)
        else:
            operations = {
                phase: tuple(one.operation for one in found if one.operation is not None)
                for phase, found in self._operations.items()
            }
        over_tp, over_cp, over_experts = self._over("tp"), self._over("cp"), self._over("ep_etp", "etp")
        if self._assumes_backward:
            operations |= assumed_backward(operations["forward"])
        transfers = (found["recomputation"] for found in (over_tp, over_cp, over_experts))
        again = Recomputation(operations["recomputation"], *transfers)
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
            forward_dispatches=over_experts["forward"],
            backward_dispatches=over_experts["backward"],
        )

    def assume_backward(self) -> None:
        """Make the next `take` derive the backward from the forward, as it does not run on meta."""
        self._assumes_backward = True

    def collective(self, group: Group, kind: str, tensor: Tensor) -> None:
        """Record a collective of `tensor`, this rank's input, over a group; `kind`: such as "all_reduce"."""
        if self._phase is None or not tensor.nbytes:
            return
        phase, memory = self._current(), self._number(tensor)
        reads = self._ranges([Access(tensor, tensor.nbytes)])
        self._operations[phase].append(RecordedOperation(None, reads, {}))
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
        name: Any = kind.replace("_", "-")
        self._transfers[phase].append(AxisTransfer(name, axis, nbytes))

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record what an ATen operation computes; arguments as of `operations_of`.

        One that calls others, such as `out_dtype`, counts as element-wise.
        """
        name = operation_name(func)
        recorded, accesses = self._operations[self._current()], accesses_of(name, args, kwargs, result)
        last = recorded[-1].operation if recorded else None
        if name == "add_" and isinstance(last, Product) and _is_result(last, args[0], args[1]):
            # A GPU multiplies into the gradient.
            recorded[-1] = recorded[-1]._replace(operation=replace(last, result_bytes=2 * args[0].itemsize))
        elif accesses.writes:
            reads = self._ranges(accesses.reads)
            writes = {self._number(tensor): nbytes for tensor, nbytes in accesses.writes}
            operations = operations_of(name, args, kwargs, result, accesses)
            recorded.extend(RecordedOperation(one, reads, writes) for one in operations)

    def _ranges(self, accesses: Iterable[Access]) -> dict[Range, int]:
        """Return accesses by where in memory they are."""
        return {
            (self._number(tensor), int(tensor.storage_offset()), tensor.numel()): nbytes
            for tensor, nbytes in accesses
        }

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, which no later storage gets."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._count += 1
            self._storages[key] = ref(storage, lambda _: self._storages.pop(key)), self._count
        return self._storages[key][1]

    def _current(self) -> Phase:
        """Return the phase in progress, or within a backward the recomputation."""
        run = RECOMPUTED_RUN.get()
        assert self._phase is not None
        return "recomputation" if run is not None and run.is_second else self._phase

    def _over(self, *axes: str) -> dict[Phase, tuple[AxisTransfer, ...]]:
        """Return the bytes and calls of transfers over some axes, by phase."""
        return {
            phase: tuple(one for one in found if one.axis in axes) for phase, found in self._transfers.items()
        }


def group_on_meta(axis: str, size: int, index: int, recorder: OperationRecorder | None) -> Group:
    """Return a `Group` of ranks that do not exist, for layers on meta; `recorder` records its collectives."""
    on_skip = None if recorder is None else recorder.collective
    return Group(axis, tuple(range(size)), index, None, Traffic(), 0.0, on_skip=on_skip)


def recording(
    recorder: OperationRecorder | None, phase: Phase, *others: Observer
) -> AbstractContextManager[None]:
    """Return a context in which `recorder` records ATen operations under `phase`; one of None does nothing.

    `others` are called after each operation, too.
    """
    return RememberedResults(*others) if recorder is None else recorder.recording(phase, *others)


def with_loss(layer: LayerWork, loss: LayerWork) -> LayerWork:
    """Return the operations and collectives of the last layer and of the loss together."""
    return replace(
        layer,
        forward=layer.forward + loss.forward,
        backward=loss.backward + layer.backward,
        forward_transfers=layer.forward_transfers + loss.forward_transfers,
        backward_transfers=loss.backward_transfers + layer.backward_transfers,
    )


def assumed_backward(forward: Iterable[DeviceOperation]) -> dict[Phase, tuple[DeviceOperation, ...]]:
    """Return the operations of the backward, derived from those of the forward.

    Of a product, one with each of its factors transposed; one with a weight is the weight's gradient.
    """
    backward: list[DeviceOperation] = []
    weights: list[DeviceOperation] = []
    for operation in reversed(tuple(forward)):
        if isinstance(operation, Product):
            m, n, k = operation.m, operation.n, operation.k
            backward.append(replace(operation, n=k, k=n))
            (weights if operation.is_linear else backward).append(replace(operation, m=n, n=k, k=m))
        elif isinstance(operation, FusedAttention):
            backward.append(replace(operation, backward=True))
        else:
            backward.append(operation)
    return {"backward": tuple(backward), "weights": tuple(weights)}


def _is_result(product: Product, total: Tensor, added: Any) -> bool:
    """Return whether `added` to `total` is the result of `product`, the last operation."""
    return isinstance(added, Tensor) and added.shape == total.shape == (product.m, product.n)
