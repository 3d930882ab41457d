"""`OneHostRendezvous`: torch's rendezvous interface for a single supervisor, on one host."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from plait.ranks.failure.rank_failure import RankFailure
from plait.ranks.run_store import listen

_HOST = "127.0.0.1"


class OneHostRendezvous(RendezvousHandler):
    """Rendezvous handler for one host: numbers the restarts (generations), and serves the ranks' TCPStore.

    The store is in the supervisor's process, so that it outlives every rank. Each generation has keys of its
    own there.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        store = listen(_HOST, 0)
        assert isinstance(store, TCPStore), "the system chooses a free port"
        self._store, self._port = store, int(store.port)
        self.generation = 0
        """The number of the current world, the first is 1."""

    @property
    def address(self) -> str:
        """The address at which ranks find the store, `tcp://HOST:PORT`."""
        return f"tcp://{_HOST}:{self._port}"

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next generation; return torch's `RendezvousInfo`, with a store for that generation.

        The store is for supervisors, of which this is the only one.
        """
        self.generation += 1
        store = PrefixStore(f"supervisors/{self.generation}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._port))

    def get_backend(self) -> str:
        """Return the name of the kind of rendezvous, for torch's events."""
        return "plait"

    def get_run_id(self) -> str:
        """Return the run's random id, as torch's agent asks for it."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return 0: there are no other hosts."""
        return 0

    def is_closed(self) -> bool:
        """Return False: it closes with the supervisor's process."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other hosts that it would keep from joining."""

    def shutdown(self) -> bool:
        """Return True: the store ends with this object."""
        return True

    @property
    def other_hosts(self) -> frozenset[str]:
        """No addresses: there are no other hosts."""
        return frozenset()

    @property
    def handles(self) -> tuple[int, ...]:
        """No file descriptors to wait for: there are no other hosts."""
        return ()

    def ranks(self, ready: int) -> tuple[range, int]:
        """Return the ranks 0 to `ready - 1`, which are all on this host, and their number, `ready`."""
        return range(ready), ready

    def report(self, failure: RankFailure, last_good_step: int | None, ranks: Sequence[int] = ()) -> None:
        """Do nothing: there are no other hosts to tell which rank has failed."""

    def failure_elsewhere(self) -> None:
        """Return None: there are no other hosts."""

    def reason(self) -> str:
        """Return "": no other host makes this one stop."""
        return ""

    def exchange_waiting(self, some: bool, each: bool) -> tuple[bool, bool]:
        """Return (False, True): without other hosts, "some ranks there wait" is false and "all wait" true."""
        return False, True

    def finish(self, results: Sequence[bytes]) -> bool:
        """Return True: all hosts have the results of their ranks."""
        return True
