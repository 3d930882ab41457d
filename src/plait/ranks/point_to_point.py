"""Point-to-point messages between two ranks of a group.

A send is a rendezvous: it completes when the other rank has posted its receive, so post receives early, in
the order of the program. Messages of one pair arrive in the order in which they were sent, per tag on Gloo
(NCCL has no tags). Shapes and dtypes are not checked: Gloo ends the process if a message is longer than the
buffer.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from plait.errors import CommunicationError
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.ranks.transport.buffers import copy_out, output_buffer
from plait.ranks.transport.interface import Transport


def send(tensor: Tensor, group: Group, destination: int, *, label: str = "", tag: int = 0) -> Handle[None]:
    """Start a send to the rank with index `destination`; do not write to `tensor` before the wait returns.

    `label` names the message in errors, e.g. `"1F3"`. Any shape, dtype and strides. Traffic: its bytes.
    Raises `CommunicationError` for an index that is no other rank; the wait raises failures of the operation.
    """
    peer, transport = _peer(destination, group, "send to")
    group.traffic.record(group.name, "send", tensor.nbytes)
    awaited = f"{label or 'its message'} to reach rank {peer} over {group.name}"
    return Handle(
        partial(transport.send, tensor, destination, tag, label), lambda: None, awaited, group, peer
    )


def receive(buffer: Tensor, group: Group, source: int, *, label: str = "", tag: int = 0) -> Handle[Tensor]:
    """Post a receive into `buffer` from the rank with index `source`; the handle returns `buffer`.

    Shape and dtype are the sender's; strides may differ. Other arguments and errors as for `send`.
    """
    peer, transport = _peer(source, group, "receive from")
    received = output_buffer(buffer, buffer.shape, buffer)
    group.traffic.record(group.name, "receive", buffer.nbytes)
    awaited = f"{label or 'a message'} from rank {peer} over {group.name}"
    start = partial(transport.receive, received, source, tag, label)
    return Handle(start, lambda: copy_out(received, buffer), awaited, group, peer)


def _peer(index: int, group: Group, what: str) -> tuple[int, Transport]:
    """Return the global rank at `index`, and the group's transport. Raises unless that is another rank."""
    if not 0 <= index < group.size or index == group.index:
        raise CommunicationError(
            f"rank {group.rank} cannot {what} index {index} of {group.name}: the group has indices 0 to "
            f"{group.size - 1} and this rank is {group.index}, give another one of them."
        )
    assert group.transport is not None, "a group of several ranks is connected"
    return group.ranks[index], group.transport
