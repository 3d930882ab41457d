"""Everything that can go wrong for a user, each as one sentence: what, where, which values, how to mend.

The command line prints a `PlaitError` without a traceback and exits with code 2.
"""

from collections.abc import Sequence

MOST_TOLD = 20
"""Names in one sentence."""


def listed(names: Sequence[str], *, most: int = MOST_TOLD, between: str = ", ") -> str:
    """Names as a sentence tells them: the first ones, and how many more there are."""
    more = f"{between.rstrip(', ')} and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


class PlaitError(Exception):
    """Base of all errors that a user can mend."""


class ConfigError(PlaitError):
    """A configuration field is unknown or has a bad value."""


class PlanError(PlaitError):
    """A plan contradicts itself, the model or the batch."""


class MeshError(PlaitError):
    """A mesh does not fit the world of ranks, or the plan."""


class LayoutError(PlaitError):
    """A tensor cannot be laid out over the mesh as asked."""


class ScheduleError(PlaitError):
    """A schedule breaks a rule; the message names the rule, the rank and the action."""


class ModelError(PlaitError):
    """A model is not a sequence of layers that plait can run."""


class DataError(PlaitError):
    """A corpus or a batch cannot be used."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be written, read, or used here; the message names the file or the tensors."""

    def __init__(self, message: str, damaged: bool = False) -> None:
        """`damaged`: it is not what was once written, so that another one may do."""
        super().__init__(message)
        self.damaged = damaged


class CommunicationError(PlaitError):
    """A collective or a message failed; the message names the operation, the rank and the peer."""


class ReplicaError(PlaitError):
    """Ranks that must hold the same hold something else; the message names the tensor and the ranks."""


class NonFiniteError(PlaitError):
    """The loss or the gradient norm is not a finite number."""


class RankError(PlaitError):
    """A rank failed; carries that rank's number and its traceback."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
