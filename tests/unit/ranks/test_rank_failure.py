"""Reports of failed ranks, and which of several failures is the cause."""

from __future__ import annotations

import pickle
import signal

import pytest

from plait.errors import CommunicationError, MeshError, PlaitError, RankError
from plait.ranks.failure.rank_failure import RankFailure, from_exception, from_exit, root_cause


def failure(error: BaseException) -> RankFailure:
    """The report of rank 3, in which a function below plait's own frame has raised."""

    def function() -> None:
        raise error

    try:
        function()
    except BaseException as caught:
        return from_exception(3, caught)


class OfTheUser(PlaitError):
    """An error that cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("no")


def test_the_earliest_failure_that_is_no_consequence_is_the_cause() -> None:
    late, early, noticed = RankFailure(0, "", at=3.0), RankFailure(1, "", at=2.0), RankFailure(2, "", at=1.0)
    assert root_cause([late, early, noticed]) is noticed
    noticed = RankFailure(2, "", at=1.0, secondary=True)
    assert root_cause([late, early, noticed]) is early
    assert root_cause([noticed, RankFailure(3, "", at=0.5, secondary=True)]).rank == 3


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (None, "closed its pipe"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (
            -signal.SIGKILL,
            "was killed by SIGKILL (when it was not you: the system may have run out of memory)",
        ),
        (-37, "was killed by signal 37"),
        (0, "ended with exit code 0 before its function returned"),
        (
            255,
            "ended with exit code 255 before its function returned (or the process that ranks are forked "
            "from was killed)",
        ),
    ],
)
def test_a_process_that_has_ended_says_how(code: int | None, told: str) -> None:
    found = from_exit(4, code, "a stack")
    assert found == RankFailure(4, told, "a stack", at=found.at)
    assert found.at > 0
    error = found.exception("rank 5 waits.")
    assert (str(error), error.rank, error.traceback) == (
        f"rank 4 {told}\n\na stack\n\nrank 5 waits.",
        4,
        "a stack",
    )


def chained(
    outer: BaseException, cause: BaseException | None = None, context: BaseException | None = None
) -> BaseException:
    outer.__cause__, outer.__context__ = cause, context
    outer.__suppress_context__ = cause is not None
    return outer


def test_which_errors_only_notice_that_a_peer_is_gone() -> None:
    closed = RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
    for error in (
        closed,
        OSError("Broken pipe"),
        CommunicationError("rank 1 waits."),
        chained(ValueError("x"), cause=closed),
        chained(ValueError("x"), context=closed),
        chained(ValueError("x"), cause=chained(KeyError(1), context=closed)),
    ):
        assert failure(error).secondary, error
    for other in (
        ValueError("timed out"),
        RuntimeError("a mistake"),
        chained(ValueError("x"), ValueError("y"), closed),
    ):
        assert not failure(other).secondary, other
    loop = ValueError("x")
    assert not failure(chained(loop, cause=chained(KeyError(1), cause=loop))).secondary


def test_an_error_of_plait_comes_back_as_it_was() -> None:
    found: RankFailure = pickle.loads(pickle.dumps(failure(MeshError("one sentence."))))
    error = found.exception("rank 5 waits.")
    assert type(error) is MeshError
    assert str(error) == "one sentence."
    cause = error.__cause__
    assert isinstance(cause, RankError)
    assert str(cause) == f"rank 3 raised the error that follows\n\n{found.frames.rstrip()}\n\nrank 5 waits."
    assert "in function" in found.frames
    assert "in failure" not in found.traceback, "plait's own frame is left out"
    noticed = failure(CommunicationError("rank 3 waits.")).exception()
    assert type(noticed) is CommunicationError
    assert "failed: " in str(noticed.__cause__)


def test_another_error_is_text_with_its_traceback() -> None:
    for error, name in (
        (ValueError("the culprit"), "ValueError: the culprit"),
        (RankError("rank 7 failed", 7, ""), "plait.errors.RankError: rank 7 failed"),
        (OfTheUser("unsendable"), f"{OfTheUser.__module__}.OfTheUser: unsendable"),
    ):
        found = failure(error)
        assert found.error is None
        assert found.summary == f"failed: {name}"
        told = found.exception()
        assert type(told) is RankError
        assert str(told) == f"rank 3 failed: {name}\n\n{found.traceback.rstrip()}"
        assert (told.rank, told.traceback) == (3, found.traceback)


def test_an_error_whose_class_cannot_be_imported_here_is_told_with_its_traceback() -> None:
    found = RankFailure(2, "failed: mine.Error: no", "Traceback: no", error=b"cmine\nError\n.").exception()
    assert isinstance(found, RankError)
    assert str(found) == "rank 2 failed: mine.Error: no\n\nTraceback: no"
