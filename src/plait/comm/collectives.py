"""Collectives of a group. Each starts at once and returns a handle; several may be in flight.

Every rank of the group makes the same calls in the same order. A `checked` call first makes sure of that: it
blocks until the group has come, and fails on every rank if one means something else. Without the check, as on
the hot path whose shapes were agreed on before, a mismatch ends the process or hangs until the timeout.

Results are the same bits on every rank, whoever comes first. Pieces are in order of the index. A rank that is
alone gets its own tensor back. Traffic counts the bytes of the tensor that a rank hands in. Any call may
raise `CommunicationError`: here for its arguments, from `Handle.wait()` for what happens on the way.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from plait.comm import arithmetic, nearby
from plait.comm.backend import all_gather_single, as_bytes, deliver, dense, landing
from plait.comm.call import alone, begin, outside, start, swap, undivided, unfit, whole_shape
from plait.comm.group import Group
from plait.comm.handle import Handle
from plait.comm.reductions import all_reduce, reduce, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def all_gather(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Concatenate the ranks' tensors along dim 0: `[n, ...]` to `[size * n, ...]`, in `out` if given.

    `tensor` may be this rank's piece of `out`. A 0-d tensor counts as `[1]`.
    """
    shape = whole_shape(tensor, group)
    begin("all_gather", tensor, group, flaw=unfit(out, shape, tensor), checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    landed = landing(out, shape, mine)
    if arithmetic.way_to_all_gather(mine, group) == "whole":
        show = partial(nearby.gather_whole, mine, landed, group)
        return start("all_gather", group, show, lambda: deliver(landed, out))
    launch = partial(all_gather_single, as_bytes(landed), as_bytes(mine), group)
    return start("all_gather", group, launch, lambda: deliver(landed, out), mine)


def all_to_all(
    tensor: Tensor, group: Group, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor]:
    """Send the i-th of `size` equal pieces of dim 0 to index i; give what came, in order, in `out` if given.

    `[size * n, ...]` to the same shape. `out` is other memory than `tensor`.
    """
    flaw = undivided(tensor, group) or unfit(out, tensor.shape, tensor)
    begin("all_to_all", tensor, group, flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor, out), group)
    mine = dense(tensor)
    landed = landing(out, mine.shape, mine)
    return start("all_to_all", group, partial(swap, landed, mine, group), lambda: deliver(landed, out), mine)


def broadcast(tensor: Tensor, group: Group, source: int = 0, *, checked: bool = True) -> Handle[Tensor]:
    """Overwrite the tensor of every rank by that of the rank with index `source`, in place."""
    flaw = outside(source, group)
    begin("broadcast", tensor, group, detail=f"from {source}", flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(tensor, group)
    mine = dense(tensor)
    launch = partial(
        dist.broadcast, as_bytes(mine), group=group.process_group, async_op=True, group_src=source
    )
    return start("broadcast", group, launch, lambda: deliver(mine, tensor))


def gather(
    tensor: Tensor, group: Group, destination: int = 0, *, out: Tensor | None = None, checked: bool = True
) -> Handle[Tensor | None]:
    """`all_gather`, but only the rank with index `destination` gets the result; the others get `None`."""
    shape = whole_shape(tensor, group)
    flaw = outside(destination, group) or unfit(out, shape, tensor)
    begin("gather", tensor, group, detail=f"to {destination}", flaw=flaw, checked=checked)
    if group.process_group is None:
        return Handle.done(alone(tensor.reshape(shape), out), group)
    mine = dense(tensor)
    receives = group.index == destination
    landed = landing(out, shape, mine) if receives else None
    pieces = None if landed is None else list(as_bytes(landed).tensor_split(group.size))
    launch = partial(
        dist.gather, as_bytes(mine), pieces, group=group.process_group, async_op=True, group_dst=destination
    )

    def finish() -> Tensor | None:
        return None if landed is None else deliver(landed, out)

    return start("gather", group, launch, finish, mine)


def scatter(
    pieces: Tensor | None, group: Group, source: int = 0, *, out: Tensor, checked: bool = True
) -> Handle[Tensor]:
    """Fill every rank's `out[n, ...]` with its piece of `pieces[size * n, ...]`, which only the source has.

    `source` is an index in the group; the other ranks may pass `None` (and count no bytes).
    """
    shape = whole_shape(out, group)
    sends = group.index == source
    flaw = outside(source, group)
    if flaw is None and sends:
        flaw = "the source has no pieces" if pieces is None else unfit(pieces, shape, out)
    payload = pieces if sends else None
    sent = 0 if payload is None else payload.nbytes
    begin("scatter", out, group, detail=f"from {source}", flaw=flaw, checked=checked, payload=sent)
    if group.process_group is None:
        assert payload is not None
        return Handle.done(alone(payload.reshape(out.shape), out), group)
    mine = None if payload is None else dense(payload)
    parcels = None if mine is None else list(as_bytes(mine).tensor_split(group.size))
    landed = landing(out, out.shape, out)
    launch = partial(
        dist.scatter, as_bytes(landed), parcels, group=group.process_group, async_op=True, group_src=source
    )
    return start("scatter", group, launch, lambda: deliver(landed, out), mine)


def barrier(group: Group, *, checked: bool = True) -> Handle[None]:
    """Done when every rank of the group has come. Blocks the host when waited for, on NCCL too."""
    begin("barrier", None, group, flaw=None, checked=checked)
    if group.process_group is None:
        return Handle.done(None, group)
    launch = partial(dist.barrier, group.process_group, async_op=True)
    return start("barrier", group, launch, lambda: None)
