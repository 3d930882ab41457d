from __future__ import annotations

import inspect
import pickle

import pytest

from plait import errors
from plait.errors import CheckpointError, PlaitError, RankError, listed

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


def test_the_error_classes_are_collected() -> None:
    assert {"PlanError", "ScheduleError", "ModelError", "RankError"} <= {kind.__name__ for kind in ALL}


@pytest.mark.parametrize("kind", ALL)
def test_every_error_class_is_a_plait_error_with_a_docstring(kind: type[Exception]) -> None:
    assert issubclass(kind, PlaitError)
    assert kind.__doc__
    assert kind is PlaitError or kind.__name__.endswith("Error")


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not RankError])
def test_every_error_survives_pickling(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("a sentence.")))
    assert type(error) is kind
    assert str(error) == "a sentence."


def test_a_checkpoint_error_keeps_its_damage_flag_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("a sentence.", damaged=True)))
    assert (str(error), error.damaged) == ("a sentence.", True)


@pytest.mark.parametrize(
    ("most", "between", "said"),
    [(3, ", ", "a, b, c"), (2, ", ", "a, b and 1 more"), (1, "; ", "a; and 2 more")],
)
def test_an_error_lists_only_the_first_of_many_names(most: int, between: str, said: str) -> None:
    assert listed(["a", "b", "c"], most=most, between=between) == said


def test_a_rank_error_carries_its_rank_and_traceback() -> None:
    error = RankError("rank 3 failed.", rank=3, traceback="Traceback …")
    assert (str(error), error.rank, error.traceback) == ("rank 3 failed.", 3, "Traceback …")
