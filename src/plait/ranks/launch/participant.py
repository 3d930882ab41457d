"""Identity of a rank at the rendezvous: its run, user, host and process; whether two ranks are of one run."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Self

from plait.errors import CommunicationError
from plait.ranks.transport.shared_memory.host_discovery import host_identity
from plait.ranks.world import World


@dataclass(frozen=True)
class Participant:
    """A rank, its run, and its process, as written to the store of a rendezvous."""

    rank: int
    world_size: int
    launcher: str
    job: str
    user: int
    host: str
    """The identity of its host: equal for processes that reach each other by its loopback interface."""
    process: str
    token: str
    """A random text: another for each process, and for each rendezvous of a process."""

    @classmethod
    def of(cls, world: World) -> Self:
        """Return the identity of this process as a rank of `world`."""
        identity = host_identity()
        return cls(
            world.rank,
            world.world_size,
            world.launcher,
            world.job,
            os.geteuid(),
            " ".join(value for name, value in identity.items() if name != "owner"),
            f"process {os.getpid()} on {socket.gethostname()}",
            secrets.token_hex(8),
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the participant that `text` describes. Raises `CommunicationError` for other text."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            raise CommunicationError(
                f"the store has {text[:100]!r} where a rank should be described"
            ) from None

    def text(self) -> str:
        """Return the text that `read` takes."""
        return json.dumps(asdict(self))

    @property
    def run(self) -> str:
        """The run of this rank, for messages."""
        job = f" {self.job}" if self.job else ""
        return (
            f"a run of user {self.user} by {self.launcher}{job}, of which rank {self.rank} is {self.process}"
        )

    def is_of_run(self, other: Participant) -> bool:
        """Return whether both were started by one launcher in one job, by one user where on one host."""
        one_user = self.user == other.user or self.host != other.host
        return (self.launcher, self.job) == (other.launcher, other.job) and one_user

    def is_process_of(self, other: Participant) -> bool:
        """Return whether both are the same process."""
        return (self.process, self.host) == (other.process, other.host)

    def contradiction(self, other: Participant) -> str:
        """Return why `other`, of the same run, cannot take part with this rank; "" if it can."""
        if other.world_size != self.world_size:
            return (
                f"rank {self.rank} ({self.process}) is one of {self.world_size} ranks, and rank "
                f"{other.rank} ({other.process}) one of {other.world_size}: start all with one number."
            )
        return ""
