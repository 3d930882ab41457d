"""What a group asks of whatever carries its bytes, and a mesh of the ranks that started together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.comm.last_words import LastWords
from plait.comm.transport.reduction import Op


class Pending(Protocol):
    """An operation that has started and is not waited for yet. It keeps its tensors alive."""

    def wait(self, awaited: str = "") -> None:
        """Block until the results are in place; `awaited` completes "rank 1 waits for ..." in reports.

        On NCCL it orders streams and does not block. Raises `RuntimeError` or `OSError` where it failed.
        """

    def abandon(self) -> bool:
        """Nobody needs the result. Whether no tensor is read or written any more; else `wait` in time."""


class Transport(Protocol):
    """Carries the bytes of one group. Ranks are counted by their index in it.

    Tensors that are written are contiguous, those that are read may have any strides. All ranks make the same
    calls in the same order, with the same shapes and dtypes; nothing checks that. Each call returns at once,
    and several operations may be pending. Until the wait is over what is read must not be written, and what
    is written must not be read.
    """

    @property
    def carries_cpu_tensors(self) -> bool:
        """Whether tensors on the CPU can travel; without Gloo they cannot."""

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks of the group are known to be on one host."""

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Reduce `tensor` over the group into `total`, which may be the same memory."""

    def reduce(self, tensor: Tensor, op: Op, destination: int) -> Pending:
        """Reduce a contiguous tensor in place at `destination`; what the others then hold is undefined."""

    def reduce_scatter(self, tensor: Tensor, piece: Tensor, op: Op) -> Pending:
        """Reduce `tensor` over the group, and write this rank's of `size` equal pieces of dim 0 to `piece`.

        `piece` may be that piece of `tensor`.
        """

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Write the ranks' tensors to `whole` in order of the index; `tensor` may be its piece of that."""

    def all_to_all(self, tensor: Tensor, received: Tensor) -> Pending:
        """Send the i-th of `size` equal pieces of dim 0 to index i; write what comes, in order."""

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Overwrite a contiguous tensor by that of `source`."""

    def gather(self, tensor: Tensor, whole: Tensor | None, destination: int) -> Pending:
        """As `all_gather`, at `destination` alone; the others give no `whole`."""

    def scatter(self, pieces: Tensor | None, own: Tensor, source: int) -> Pending:
        """Write to `own` this rank's piece of `pieces`, which `source` alone gives."""

    def barrier(self) -> Pending:
        """Done when all ranks have called it."""

    def send(self, tensor: Tensor, destination: int, tag: int) -> Pending:
        """Send to one rank; done at the earliest when that has posted its receive."""

    def receive(self, buffer: Tensor, source: int, tag: int) -> Pending:
        """Post a receive into a contiguous buffer. Messages of one pair and tag keep their order."""

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Zeros in CPU memory that all ranks reach, reduced where they lie; None where that is not done.

        Blocks until all ranks have theirs.
        """

    def shares(self, tensor: Tensor) -> bool:
        """Whether a tensor was made by `shared_zeros`."""

    def abort(self, cause: Exception) -> None:
        """An operation failed: let the pending ones fail soon, here and where other ranks wait for them."""


class Ranks(Protocol):
    """The ranks that started together, seen from one of them: makes the transports of groups."""

    rank: int
    size: int
    shared_results: dict[Hashable, Any]
    """What a rank has computed, for the other ranks of its process and for its own next mesh."""

    @property
    def uses_nccl(self) -> bool:
        """Whether CUDA tensors travel over NCCL."""

    @property
    def failure_log(self) -> LastWords | None:
        """Where ranks write what they waited for when an operation failed, where they can."""

    def world(self) -> Transport | None:
        """The transport of all ranks, which is there before any is made; None for one rank alone."""

    def discover(self, timeout: float) -> None:
        """Find out what the ranks share, such as a host, once for each mesh; all ranks call it, and block.

        `timeout`, in seconds, is the mesh's: so long may ranks take to find out who failed first.
        """

    def connect(self, groups: Sequence[tuple[int, ...]], name: str, timeout: float) -> Transport | None:
        """Return the transport of the one of `groups` that this rank is in; None in none, or alone.

        All ranks call it alike. `timeout`, in seconds, holds for every wait.
        """

    def close(self) -> None:
        """Give back what `connect` made."""
