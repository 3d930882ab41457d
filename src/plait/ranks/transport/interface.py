"""Interfaces: `Transport` for a group, `RankTransports` for the world, `Pending` for an operation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from plait.ranks.failure.failure_log import FailureLog
from plait.ranks.transport.rank_order_reduction import Op


class Pending(Protocol):
    """A started operation that has not been waited for. It keeps its tensors alive."""

    def wait(self, awaited: str = "") -> None:
        """Block until the results are in place; `awaited` completes "rank 1 waits for ..." in reports.

        On NCCL it orders streams and does not block. Raises `RuntimeError` or `OSError` on failure.
        """

    def abandon(self) -> bool:
        """Discard the result; return True if the operation's tensors can be reused now; else `wait` first."""


class RangeSizes(NamedTuple):
    """How many elements a rank sends to each rank in an all-to-all, and how many it receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    most: int | None = None
    """A number of elements, the same on all ranks, more than which none sends; None: not known."""


class Transport(Protocol):
    """Interface for the communication within one group, whose ranks are addressed by their index.

    Output tensors are contiguous, input tensors may have any strides. All ranks make the same calls in the
    same order, with the same shapes and dtypes, which is not checked. Each call returns at once, and several
    operations may be pending. Until the wait returns, inputs must not be written and outputs not be read.
    """

    @property
    def carries_cpu_tensors(self) -> bool:
        """Whether CPU tensors can be sent (False for a group that has NCCL only)."""

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks of the group are known to be on one host."""

    def all_reduce(self, tensor: Tensor, total: Tensor, op: Op) -> Pending:
        """Start the all-reduce of `tensor` over the group into `total`, which may be the same memory."""

    def reduce(self, tensor: Tensor, op: Op, destination: int) -> Pending:
        """Start the in-place reduce of a contiguous tensor to index `destination`; undefined on others."""

    def reduce_scatter(self, tensor: Tensor, own_range: Tensor, op: Op) -> Pending:
        """Start the reduce-scatter of `tensor`: this rank's `1 / size` of dim 0 goes to `own_range`.

        `own_range` may be that range of `tensor`.
        """

    def all_gather(self, tensor: Tensor, whole: Tensor) -> Pending:
        """Start the all-gather of all ranks' tensors into `whole`; `tensor` may be its own range there."""

    def all_to_all(self, tensor: Tensor, received: Tensor, sizes: RangeSizes | None = None) -> Pending:
        """Start the all-to-all: range i of `tensor` goes to index i; received ranges go into `received`.

        The i-th range of `received` comes from index i. With `sizes`, which differ between ranks, `tensor` is
        flat, and `sizes.sent[i]` of this rank is `sizes.received[index]` of rank index i. None: equal ranges.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """Start the broadcast of a contiguous tensor from index `source`, which overwrites the others'."""

    def gather(self, tensor: Tensor, whole: Tensor | None, destination: int) -> Pending:
        """Start the gather of all tensors into `whole` on index `destination`; the other ranks pass None."""

    def scatter(self, ranges: Tensor | None, own: Tensor, source: int) -> Pending:
        """Start the scatter of the `ranges` of index `source` to each rank's `own`; the others pass None."""

    def barrier(self) -> Pending:
        """Start a barrier, complete when all ranks of the group have called it."""

    def send(self, tensor: Tensor, destination: int, tag: int, label: str = "") -> Pending:
        """Start a send to index `destination`; it may complete only once that has posted its receive.

        `label`: for errors.
        """

    def receive(self, buffer: Tensor, source: int, tag: int, label: str = "") -> Pending:
        """Post a receive into a contiguous buffer. Messages of one pair and tag keep their order."""

    def shared_zeros(self, size: int, dtype: torch.dtype, awaited: str) -> Tensor | None:
        """Return zeros in shared CPU memory, to be all-reduced in place; None where it is not supported.

        Blocks until all ranks have called it.
        """

    def shares(self, tensor: Tensor) -> bool:
        """Return whether `tensor` was made by `shared_zeros`."""

    def abort(self, cause: Exception) -> None:
        """Make the group's pending operations fail soon, on all ranks, after one failed with `cause`."""


class RankTransports(Protocol):
    """Interface by which a rank gets a `Transport` for each group; ranks are processes or threads."""

    rank: int
    size: int
    shared_results: dict[Hashable, Any]
    """Results of one rank, by their inputs: for the other ranks of its process and for its own next mesh."""

    @property
    def uses_nccl(self) -> bool:
        """Whether CUDA tensors are sent over NCCL."""
        return False

    @property
    def timeout(self) -> float | None:
        """Timeout of operations over all ranks, in seconds; None where none is set."""
        return None

    @property
    def failure_log(self) -> FailureLog | None:
        """The log in which all ranks record failures; None where they have no shared store for it."""
        return None

    def world(self) -> Transport | None:
        """Return a transport over all ranks, usable before groups are made; None for one rank or threads."""
        return None

    def discover(self, timeout: float) -> None:
        """Find which ranks share a host, once for each mesh. Blocks until all ranks have called it.

        `timeout`, in seconds, is the mesh's; it bounds the search for the rank that failed first.
        """
        return

    def connect(
        self, groups: Sequence[tuple[int, ...]], name: str, timeout: float, max_ctas: int | None = None
    ) -> Transport | None:
        """Return a transport over the group that has this rank; None without such a group, or peers in it.

        All ranks call it with the same arguments. `timeout`, in seconds, holds for every wait. `max_ctas`:
        the most thread blocks of an operation on NCCL; None: as many as NCCL chooses.
        """

    def close(self) -> None:
        """Close all transports that `connect` made."""
        return

    def forget(self) -> None:
        """Drop all transports' connections without communication, since their world has failed."""
        return
