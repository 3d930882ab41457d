"""Which ranks communicate in shared memory."""

from __future__ import annotations

from plait.ranks.transport.shared_memory.host_discovery import HostRanks
from plait.ranks.transport.shared_memory.peer_sockets import Listener


def test_ranks_that_all_listen_on_one_host_share_memory() -> None:
    """Ranks 0 and 1 do; 2 is a host of the same name, and 3 has no listener."""
    here, there = {"host": "node", "boot": "1"}, {"host": "node", "boot": "2"}
    infos = [here | {"listener": "a"}, here | {"listener": "b"}, there | {"listener": "c"}, here]
    share = HostRanks(Listener(), infos).includes
    each = [(0, 1), (1, 0), (2,), (0, 2), (0, 1, 2), (0, 3), (3,)]
    assert [ranks for ranks in each if share(ranks)] == [(0, 1), (1, 0), (2,)]
