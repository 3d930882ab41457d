"""`Elastic`: how a run goes on when ranks are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from plait.errors import MeshError
from plait.plan.argument_checks import require_choice, require_flag, require_whole


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Settings of an elastic run: how `plait.launch` goes on when a rank fails, dies, or hangs.

    The function is called again on all ranks, in the processes that are left and those that take the place of
    lost ones. It goes on from `plait.Snapshots`, or a checkpoint.
    """

    spares: int = 0
    """Processes that have imported torch, and wait to take the place of a lost rank."""
    replace: bool | Literal["later"] = True
    """Whether new processes are started for lost ones; else, without a spare, the ranks become fewer.

    "later": the ranks become fewer while new processes start, and more again at a snapshot after these are
    ready.
    """
    ranks_of: Callable[[int], int] | None = None
    """Returns how many of so many processes are ranks, the others become spares; 0: too few. None: all."""
    restarts: int = 1000
    """The most failures of a run, besides that the same one, three times, ends it."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of all hosts, by the launcher's numbers: there a host that is started again asks
    where the others have gone on. (): it asks host 0 only."""

    def __post_init__(self) -> None:
        require_whole("Elastic's spares", self.spares, MeshError, least=0)
        if isinstance(self.replace, str):
            require_choice(
                "Elastic's replace, unless it is True or False,", self.replace, ("later",), MeshError
            )
        else:
            require_flag("Elastic's replace", self.replace, MeshError)
        require_whole("Elastic's restarts", self.restarts, MeshError, least=0)
        names = self.hosts
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
            raise MeshError(f"Elastic's hosts are {names!r}: give a tuple of names or addresses.")
        if self.ranks_of is not None and not callable(self.ranks_of):
            raise MeshError(
                f"Elastic's ranks_of is {self.ranks_of!r}: give a function of a number of processes."
            )
