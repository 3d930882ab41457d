"""A `plait.Stream` has one reader's order on every layout; a resumed run goes on with the next sample."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import plait
from plait.errors import DataError
from plait.loop import Callback, Checkpoints, TrainingLoop
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

ROWS, BATCH = 10, 4
PLANS = {
    "one": Plan(),
    "dp": Plan(dp=2, strategy="full"),
    "pp": Plan(pp=2, microbatches=2),
    "dp of pp": Plan(dp=2, pp=2, microbatches=2),
}


class Numbers(IterableDataset[Any]):
    """Numbered samples with a position, in another order in each epoch, with drawn noise."""

    def __init__(self, rows: int = ROWS, fails_at: int = -1) -> None:
        self.rows, self.fails_at, self.at, self.epoch = rows, fails_at, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        first, self.at = self.at, 0
        for place in range(first, self.rows):
            self.at = place + 1
            if place == self.fails_at:
                raise OSError("the disk is gone")
            number = (7 * place + 3 * self.epoch) % self.rows
            yield torch.tensor([float(number), np.random.rand()]), torch.tensor(number % 2)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "as bytes": b"7", "as a tensor": torch.tensor([self.at])}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def expected(count: int) -> list[int]:
    """The first numbers of the source."""
    return [(7 * (n % ROWS) + 3 * (n // ROWS)) % ROWS for n in range(count)]


class Seen(Callback):
    """Keeps this rank's rows of each step, as the loop has them."""

    def __init__(self) -> None:
        self.rows: list[list[list[float]]] = []

    def before_step(self, run: TrainingLoop) -> None:
        if not self.rows:
            read = run.batches.batch

            def batch(step: int, rows: slice) -> Any:
                inputs, targets = read(step, rows)
                assert targets.tolist() == [int(row[0]) % 2 for row in inputs]
                self.rows.append(inputs.tolist())
                return inputs, targets

            run.batches.batch = batch  # type: ignore[method-assign]


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    for number, parameter in enumerate(layers.parameters()):
        parameter.data = torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (number + 2)
    return layers


def trained(plan: Plan, steps: int, folder: Path | None = None, **given: Any) -> dict[str, Any]:
    """Losses, and of each data-parallel rank the rows that it had."""
    seen = Seen()
    saves = [] if folder is None else [Checkpoints(folder, every=1, keep_last=0)]
    run = plait.fit(
        model(),
        plan,
        plait.Stream(given.pop("source", None) or Numbers(), batch=BATCH, **given),
        steps=steps,
        optimizer=torch.optim.SGD,
        learning_rate=0.1,
        callbacks=[*saves, seen],
    )
    return {"dp": run.engine.mesh.index("dp"), "rows": seen.rows, "steps": run.steps}


def together(found: list[dict[str, Any]], dp: int) -> list[list[list[float]]]:
    """The rows of each step over all data-parallel ranks, which ranks that are alike in dp share."""
    shares = [[one["rows"] for one in found if one["dp"] == index] for index in range(dp)]
    assert all(same == each[0] for each in shares for same in each)
    return [[row for each in shares for row in each[0][step]] for step in range(len(shares[0][0]))]


@pytest.mark.parametrize("name", PLANS)
def test_every_layout_has_the_order_of_one_reader_and_goes_on_exactly(
    name: str, thread_ranks: RankPool, tmp_path: Path
) -> None:
    """Saved on the layout after 4 steps, in the second epoch; resumed there, and on one rank."""
    plan = PLANS[name]
    whole = together(thread_ranks.run(trained, Plan(), 7, ranks=1), 1)
    assert [int(row[0]) for rows in whole for row in rows] == expected(7 * BATCH)
    first = thread_ranks.run(trained, plan, 4, tmp_path / "run", ranks=plan.world)
    assert together(first, plan.dp) == whole[:4]
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    for other, folder in ((plan, "run"), (PLANS["dp"], "other")):
        found = thread_ranks.run(trained, other, 7, tmp_path / folder, ranks=other.world)
        assert together(found, other.dp) == whole[4:]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (2, 5)])
def test_a_run_ends_with_its_epochs(
    epochs: int, steps: int, thread_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(plan: Plan, epochs: int) -> list[dict[str, Any]]:
        call = partial(trained, plan, 9, tmp_path / "run", epochs=epochs)
        return thread_ranks.run(call, ranks=plan.world)

    assert {(one["steps"], len(one["rows"])) for one in run(PLANS["dp"], epochs)} == {(steps, steps)}
    left = epochs * ROWS - steps * BATCH
    line = f"The run ends after step {steps}: the stream has no more samples"
    assert line + (f", of which the last {left} fill no batch." if left else ".") in capsys.readouterr().out
    assert run(Plan(), epochs)[0]["rows"] == []  # nothing is left
    assert [int(row[0]) for rows in run(Plan(), epochs + 1)[0]["rows"] for row in rows] == expected(99)[
        steps * BATCH : (epochs + 1) * ROWS // BATCH * BATCH
    ]


def failing(place: int) -> str:
    try:
        trained(PLANS["dp"], 9, source=Numbers(fails_at=place))
    except DataError as error:
        return str(error)
    return ""


def test_an_error_of_the_source_ends_all_ranks_with_its_name(thread_ranks: RankPool) -> None:
    text = "the source of the stream (Numbers) raised OSError at batch 2: the disk is gone"
    assert thread_ranks.run(failing, 6, ranks=2) == [text, text]


class Buffered(Numbers):
    """A source as a data set of Hugging Face after `shuffle`: its position loses what the buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self._ex_iterable = type(
            "Mapped", (), {"ex_iterable": type("BufferShuffledExamplesIterable", (), {})()}
        )

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("its position is not exact")


def test_a_source_that_shuffles_in_a_buffer_is_read_again() -> None:
    mesh = plait.Mesh(Plan(), alone=True)
    first = plait.Stream(Buffered(), batch=3).on(mesh)
    rows = [first.share()[0].tolist() for _ in range(6)]
    again, second = plait.Stream(Buffered(), batch=3).on(mesh), plait.Stream(Buffered(), batch=3).on(mesh)
    for _ in range(4):
        again.share()
    second.load_state_dict(again.state_dict())
    assert [second.share()[0].tolist() for _ in range(2)] == rows[4:]
    for step, asked in ((5, slice(0, 3)), (7, slice(0, 3)), (6, slice(0, 2))):
        with pytest.raises(DataError, match=f"gives batch 6, rows 0 to 2, next, and batch {step} was asked"):
            second.batch(step, asked)
    second.batch(6, slice(0, 3))


def test_a_stream_that_has_read_goes_back_to_an_earlier_position() -> None:
    stream = plait.Stream(Numbers(12), batch=3, epochs=1).on(plait.Mesh(Plan(), alone=True))
    start = stream.state_dict()
    rows = [stream.share()[0].tolist() for _ in range(3)]
    stream.load_state_dict(start)
    assert [stream.share()[0].tolist() for _ in range(3)] == rows


class Loaded(DataLoader[Any]):
    """A loader of batches with a position, as torchdata has it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def pairs(rows: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * rows).view(rows, 2), torch.arange(rows) % 2)


def test_batches_of_a_loader_are_taken_as_they_are(thread_ranks: RankPool) -> None:
    stream = plait.Stream(Loaded(pairs(), batch_size=4, drop_last=True), seed=np.int64(0))  # type: ignore[arg-type]
    one = stream.on(plait.Mesh(Plan(), alone=True))
    assert (stream.size, one.share()[0].tolist()) == (4, pairs()[:4][0].tolist())


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "generator": ((n for n in range(3)), {"batch": 2}, "generator without state_dict and load_state_dict"),
    "loader": (DataLoader(pairs()), {}, "DataLoader without state_dict"),
    "class": (Numbers, {"batch": 2}, "is the class Numbers: give an object of it"),
    "number": (3, {"batch": 2}, "an object of int, which is no iterable"),
    "no batch": (Numbers(), {}, "has no batch"),
    "two batches": (
        Loaded(pairs(), batch_size=4, drop_last=True),
        {"batch": 2},
        "is 2, and its source yields",
    ),
    "uneven": (Loaded(pairs(), batch_size=3), {}, "a smaller one at its end"),
    "epochs": (Numbers(), {"batch": 2, "epochs": 0}, "a stream's epochs is 0"),
    "part": (
        Loaded(pairs(), batch_size=2, drop_last=True, sampler=DistributedSampler(pairs(), 2, 0)),
        {},
        "gives each rank a part of the data",
    ),
}


def test_sources_that_cannot_be_resumed_or_read_by_one_rank_are_refused() -> None:
    for case in BAD:
        source, given, message = BAD[case]
        with pytest.raises(DataError, match=message):
            plait.Stream(source, **given)


class Failing(Numbers):
    """A source whose position cannot be had, or not be set."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self.fail)

    def fail(self, *_: Any) -> Any:
        raise OSError("gone")


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_a_position_that_the_source_does_not_give_or_take_is_said(method: str) -> None:
    position = plait.Stream(Numbers(), batch=4).on(plait.Mesh(Plan(), alone=True)).state_dict()
    stream = plait.Stream(Failing(method), batch=4).on(plait.Mesh(Plan(), alone=True))
    meets = partial(stream.load_state_dict, position) if method == "load_state_dict" else stream.state_dict
    with pytest.raises(DataError, match=rf"^{method} of the source .*\(Failing\) raised OSError.*: gone"):
        meets()


LATE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "few": (Numbers(3), {"batch": 4, "epochs": 1}, "has 3 more samples in 1 epochs, and a batch has 4"),
    "none": (Numbers(0), {"batch": 4}, "has no samples in epoch 1"),
    "no pair": (Numbers(), {"batch": 4, "collate": lambda rows: 5}, "object of int, not inputs and targets"),
    "rows": (
        Numbers(),
        {"batch": 4, "collate": lambda rows: (torch.ones(3), torch.ones(3))},
        "has 3 rows, and the stream's batch is 4",
    ),
    "collate": (
        Numbers(),
        {"batch": 4, "collate": lambda rows: rows.x},
        "collate of the stream .Numbers. raised",
    ),
    "object": (
        Numbers(),
        {"batch": 4, "collate": lambda rows: ([torch.ones(4), object()], torch.ones(4))},
        "of object",
    ),
}


def test_batches_that_cannot_be_made_are_refused() -> None:
    for case in LATE:
        source, given, message = LATE[case]
        with pytest.raises(DataError, match=message):
            plait.Stream(source, **given).on(plait.Mesh(Plan(), alone=True)).share()


def test_a_stream_is_no_validation_and_needs_its_position(tmp_path: Path) -> None:
    data = plait.Loader(pairs(), batch=4)
    fit_loader = partial(plait.fit, model(), Plan(), data, steps=2, optimizer=torch.optim.SGD)
    with pytest.raises(DataError, match=r"the validation data are a plait[.]Stream, whose rows come once"):
        plait.fit(model(), Plan(), data, steps=1, validation=plait.Stream(Numbers(), batch=4))  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"object of Loaded, without size and batch.*give a plait[.]Stream of it"
    ):
        plait.fit(model(), Plan(), Loaded(pairs()), steps=1)  # type: ignore[arg-type]
    trained(Plan(), 1, tmp_path / "stream")
    with pytest.raises(DataError, match=r"holds the position of a plait[.]Stream, and the batches are"):
        fit_loader(callbacks=[Checkpoints(tmp_path / "stream")])
    fit_loader(callbacks=[Checkpoints(tmp_path / "loader")])
    with pytest.raises(DataError, match="holds no position of a stream"):
        trained(Plan(), 3, tmp_path / "loader")
