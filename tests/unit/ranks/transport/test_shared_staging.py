"""Staging buffers: those of all ranks, here in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from plait.ranks.transport.shared_memory import shared_staging as module
from plait.ranks.transport.shared_memory.group_socket_messages import Channels
from plait.ranks.transport.shared_memory.peer_sockets import Listener
from plait.ranks.transport.shared_memory.shared_staging import PendingRead, SharedStagingBuffers

MIB = 2**20


def joined(size: int) -> list[SharedStagingBuffers]:
    listeners = [Listener() for _ in range(size)]
    names = [listener.name for listener in listeners]
    return [
        SharedStagingBuffers(Channels(listener, names, index, "tp", 10.0))
        for index, listener in enumerate(listeners)
    ]


def stage_all(
    ranks: list[SharedStagingBuffers], tensors: Sequence[Tensor], seen: list[list[Tensor]]
) -> list[PendingRead]:
    def keep(everyone: Sequence[Tensor]) -> None:
        seen.append([tensor.clone() for tensor in everyone])

    return [rank.stage(tensor, keep) for rank, tensor in zip(ranks, tensors, strict=True)]


def used_bytes(rank: SharedStagingBuffers) -> int:
    """Bytes of its segment that have ever been used."""
    return int(rank.segments.own.view(-1, 4096).any(1).sum()) * 4096


def test_all_ranks_read_all_staged_tensors_of_any_strides():
    ranks = joined(3)
    tensors = [(torch.arange(6.0).view(2, 3) + 10 * rank).t() for rank in range(3)]
    seen: list[list[Tensor]] = []
    for pending in stage_all(ranks, tensors, seen):
        pending.wait()
    wanted = [tensor.reshape(-1).tolist() for tensor in tensors]
    assert [[tensor.tolist() for tensor in everyone] for everyone in seen] == [wanted] * 3


def test_staged_reads_may_be_awaited_in_any_order_and_repeatedly():
    ranks = joined(2)
    seen: list[list[Tensor]] = []
    shown = [stage_all(ranks, [torch.full((5,), 2.0 * n + rank) for rank in (0, 1)], seen) for n in range(3)]
    for pair, order in zip(reversed(shown), ((0, 1), (1, 0), (0, 1)), strict=True):
        for index in order:
            pair[index].wait()
            pair[index].wait()
    firsts = [[tensor[0].item() for tensor in everyone] for everyone in seen]
    assert firsts == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] * 2, "what was shown before is finished first"


def test_staging_one_tensor_at_a_time_uses_two_blocks():
    ranks = joined(2)
    for n in range(20):
        for pending in stage_all(ranks, [torch.full((MIB // 4,), 1.0 + n)] * 2, []):
            pending.wait()
    assert used_bytes(ranks[0]) == used_bytes(ranks[1]) == 2 * MIB


def test_a_block_is_not_reused_before_all_have_read_it():
    ranks = joined(2)
    seen: list[list[Tensor]] = []
    late = []
    for n in range(4):
        mine, other = stage_all(ranks, [torch.full((7,), float(n)), torch.zeros(7)], seen)
        mine.wait()
        late.append(other)
    seen.clear()
    for other in late:
        other.wait()
    assert [everyone[0][0].item() for everyone in seen] == [0.0, 1.0, 2.0, 3.0]


def test_staging_beyond_the_capacity_finishes_pending_reads_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CAPACITY", 4 * MIB)
    ranks = joined(2)
    seen: list[list[Tensor]] = []
    shown = [stage_all(ranks, [torch.full((MIB // 4,), float(n))] * 2, seen) for n in range(4)]
    for _, other in shown:
        other.wait()
    assert len(seen) == 4
    ranks[1].channels.send_acknowledgement()
    ranks[0].stage(torch.full((MIB // 4,), 4.0), lambda everyone: None)
    assert len(seen) == 8  # the first rank's own
    for mine, _ in shown:
        mine.wait()
    assert [everyone[0][0].item() for everyone in seen] == [0.0, 1.0, 2.0, 3.0] * 2


def test_staging_blocks_are_reused_for_other_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CAPACITY", 4 * MIB)
    ranks = joined(2)
    for nbytes in (MIB, 2 * MIB, MIB // 2, 4 * MIB, 1, 3 * MIB):
        for n in range(5):
            for rank in ranks:
                rank.channels.send_acknowledgement()  # or each might wait for the other, in this one process
            seen: list[list[Tensor]] = []
            tensors = [torch.full((nbytes,), 2 * n + rank, dtype=torch.uint8) for rank in (0, 1)]
            for pending in stage_all(ranks, tensors, seen):
                pending.wait()
            assert all(
                torch.equal(*pair) for everyone in seen for pair in zip(everyone, tensors, strict=True)
            )


def test_a_failed_staged_read_fails_at_every_wait():
    ranks = joined(2)
    pending = ranks[0].stage(torch.ones(3), lambda everyone: None)
    ranks[1].channels.close()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            pending.wait()
