"""PyTorch's own schedules, in its own CSV: what plait makes of them, and what PyTorch makes of plait's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import UNHURRIED, written

from plait.errors import ScheduleError
from plait.pictures.timelines.timeline import simulate
from plait.schedules.check import check
from plait.schedules.costs import Costs
from plait.schedules.named_schedules import POLICIES, policy_schedule
from plait.schedules.torch_csv import from_csv, to_csv

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")


class Sizes(NamedTuple):
    ranks: int
    microbatches: int
    chunks: int


def torch_schedule(name: str, sizes: Sizes) -> Any:
    """PyTorch's schedule object, seen from rank 0; its order is that of all ranks.

    Relied on: the constructor asks of stages for these attributes only, and needs no process group.
    """
    if not hasattr(pipelining, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    stage = SimpleNamespace(
        num_stages=sizes.ranks * sizes.chunks, group_size=sizes.ranks, group_rank=0, submod=None
    )
    return getattr(pipelining, name)([stage] * sizes.chunks, sizes.microbatches)


def torch_runtime(sizes: Sizes) -> Any:
    """PyTorch's runtime without an order, for `read_by_torch`. Relied on: the private class, as above."""
    return torch_schedule("_PipelineScheduleRuntime", sizes)


def written_by_torch(schedule: Any, folder: Path) -> str:
    """Relied on: `_dump_csv` of a schedule of several stages a rank, and its argument `format`."""
    file = folder / "written.csv"
    schedule._dump_csv(file, format="compute_only")
    return file.read_bytes().decode()


def read_by_torch(text: str, sizes: Sizes, folder: Path) -> Any:
    """A runtime with the order in `text`, for which PyTorch has found sends and receives that can run.

    Relied on: `_load_csv`, its argument `format`, and that it validates and lowers what it reads.
    """
    file = folder / "read.csv"
    file.write_text(text)
    runtime = torch_runtime(sizes)
    runtime._load_csv(file, format="compute_only")
    return runtime


def order_of(schedule: Any) -> tuple[tuple[str, ...], ...]:
    """The order of a schedule object of PyTorch: no idle steps, each pair as its two actions.

    Relied on: `pipeline_order` maps ranks to actions or None; a pair has `sub_actions`; texts are `0F0`.
    """
    rows = (schedule.pipeline_order[rank] for rank in range(schedule.pp_group_size))
    return tuple(
        tuple(
            str(single) for action in row if action is not None for single in action.sub_actions or [action]
        )
        for row in rows
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csv")


LEGAL = [
    ("ScheduleInterleaved1F1B", Sizes(2, 4, 2)),
    ("ScheduleInterleaved1F1B", Sizes(4, 10, 3)),
    ("ScheduleInterleaved1F1B", Sizes(4, 3, 2)),
    ("ScheduleInterleavedZeroBubble", Sizes(4, 8, 1)),
    ("ScheduleInterleavedZeroBubble", Sizes(4, 10, 3)),
    ("ScheduleInterleavedZeroBubble", Sizes(4, 3, 2)),
    ("ScheduleZBVZeroBubble", Sizes(1, 2, 2)),
    ("ScheduleZBVZeroBubble", Sizes(4, 8, 2)),
    ("ScheduleZBVZeroBubble", Sizes(4, 3, 2)),
    ("ScheduleDualPipeV", Sizes(1, 2, 2)),
    ("ScheduleDualPipeV", Sizes(3, 6, 2)),
    ("ScheduleDualPipeV", Sizes(4, 9, 2)),
    ("ScheduleLoopedBFS", Sizes(2, 1, 2)),
]
BACKWARDS_REVERSED = [("ScheduleLoopedBFS", Sizes(2, 4, 2)), ("ScheduleLoopedBFS", Sizes(4, 8, 1))]


@pytest.mark.parametrize(("name", "sizes"), [*LEGAL, *BACKWARDS_REVERSED])
def test_plait_reads_what_torch_writes(name: str, sizes: Sizes, folder: Path) -> None:
    made = torch_schedule(name, sizes)
    read = from_csv(written_by_torch(made, folder), name)
    assert read.order == order_of(made)
    assert dict(enumerate(read.rank_of)) == made.stage_index_to_group_rank
    assert (read.policy, read.ranks, read.microbatches) == (name, sizes.ranks, sizes.microbatches)
    assert order_of(read_by_torch(to_csv(read), sizes, folder)) == read.order


@pytest.mark.parametrize(("name", "sizes"), LEGAL)
def test_torchs_schedules_are_legal(name: str, sizes: Sizes, folder: Path) -> None:
    check(from_csv(written_by_torch(torch_schedule(name, sizes), folder)))


@pytest.mark.parametrize(("name", "sizes"), BACKWARDS_REVERSED)
def test_torchs_schedule_with_reversed_backwards_is_refused(name: str, sizes: Sizes, folder: Path) -> None:
    with pytest.raises(ScheduleError, match="rule 'micro-batch order' is broken on rank 0"):
        check(from_csv(written_by_torch(torch_schedule(name, sizes), folder)))


@UNHURRIED
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 5), st.integers(1, 7))
def test_torch_reads_what_plait_writes(folder: Path, name: str, ranks: int, microbatches: int) -> None:
    schedule = policy_schedule(name, ranks, microbatches)
    read = read_by_torch(to_csv(schedule), Sizes(ranks, microbatches, schedule.stages // ranks), folder)
    assert order_of(read) == schedule.order
    assert read.stage_index_to_group_rank == dict(enumerate(schedule.rank_of))
    again = from_csv(written_by_torch(read, folder), name)
    assert again == schedule


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (["0F0 0B0 0F1 0B1", "1B0 1F0 1F1 1B1"], "without first running Forward"),
        (["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"], "can't schedule sends/recvs"),
    ],
)
def test_torch_refuses_what_cannot_run(rows: list[str], why: str, folder: Path) -> None:
    """So the test above can fail."""
    with pytest.raises(AssertionError, match=why):
        read_by_torch(to_csv(written(rows, rank_of=(0, 1), microbatches=2)), Sizes(2, 2, 1), folder)


@pytest.mark.parametrize(
    ("name", "policy", "sizes"),
    [
        ("ScheduleInterleaved1F1B", "interleaved", Sizes(2, 4, 2)),
        ("ScheduleInterleaved1F1B", "interleaved", Sizes(4, 10, 3)),
        ("ScheduleInterleaved1F1B", "interleaved", Sizes(4, 3, 2)),
        ("ScheduleInterleavedZeroBubble", "zb-h1", Sizes(4, 8, 1)),
        ("ScheduleInterleavedZeroBubble", "zb-h1", Sizes(4, 3, 1)),
    ],
)
def test_a_policy_of_torch_and_plait_has_the_same_order(
    name: str, policy: str, sizes: Sizes, folder: Path
) -> None:
    read = from_csv(written_by_torch(torch_schedule(name, sizes), folder), policy)
    chunks = sizes.chunks if policy == "interleaved" else None
    assert read == policy_schedule(policy, sizes.ranks, sizes.microbatches, chunks)


UNITS = Costs(F=1, I=1, W=1)
SHORT_WEIGHTS = Costs(F=1, I=1, W=0.9, comm=0.1)
MEASURED = Costs(F=18.522, I=18.086, W=9.337, comm=0.601)

ZERO_BUBBLE, ZBV, DUAL = "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"
PUBLISHED = [
    # makespan, span, bubble, bubble_span of 8 micro-batches on 4 ranks
    (ZERO_BUBBLE, 1, UNITS, (27.0, 27.0, 0.111111, 0.111111)),
    (ZERO_BUBBLE, 2, UNITS, (25.5, 25.5, 0.058824, 0.058824)),
    (ZERO_BUBBLE, 3, UNITS, (25.0, 25.0, 0.04, 0.04)),
    (ZERO_BUBBLE, 4, UNITS, (24.75, 24.75, 0.030303, 0.030303)),
    (ZBV, 2, UNITS, (25.5, 24.0, 0.058824, 0.0)),
    (ZERO_BUBBLE, 1, SHORT_WEIGHTS, (27.7, 27.7, 0.162455, 0.162455)),
    (ZERO_BUBBLE, 2, SHORT_WEIGHTS, (26.45, 26.45, 0.122873, 0.122873)),
    (ZERO_BUBBLE, 3, SHORT_WEIGHTS, (26.3, 26.3, 0.117871, 0.117871)),
    (ZERO_BUBBLE, 4, SHORT_WEIGHTS, (26.425, 26.425, 0.122044, 0.122044)),
    (ZBV, 2, SHORT_WEIGHTS, (26.0, 25.1, 0.107692, 0.075697)),
    (ZERO_BUBBLE, 1, MEASURED, (456.585, 456.585, 0.19498, 0.19498)),
    (ZERO_BUBBLE, 2, MEASURED, (418.0825, 418.0825, 0.120843, 0.120843)),
    (ZERO_BUBBLE, 3, MEASURED, (406.851, 406.851, 0.096573, 0.096573)),
    (ZERO_BUBBLE, 4, MEASURED, (402.43725, 402.43725, 0.086665, 0.086665)),
    (ZBV, 2, MEASURED, (403.859, 403.859, 0.08988, 0.08988)),
]


@pytest.mark.parametrize(("name", "chunks", "costs", "figures"), PUBLISHED)
def test_torchs_schedules_take_the_published_time(
    name: str, chunks: int, costs: Costs, figures: tuple[float, ...], folder: Path
) -> None:
    read = from_csv(written_by_torch(torch_schedule(name, Sizes(4, 8, chunks)), folder))
    played = simulate(read, costs)
    bubbles = round(played.bubble, 6), round(played.bubble_span, 6)
    assert (played.makespan, played.span, *bubbles) == figures


@pytest.mark.parametrize(
    ("name", "chunks", "peak", "until_input"),
    [
        # in micro-batches, per rank; the second if activations went with the input gradient
        (ZERO_BUBBLE, 1, [4.0, 4.0, 4.0, 4.0], [4.0, 3.0, 2.0, 1.0]),
        (ZERO_BUBBLE, 2, [4.0, 4.0, 4.0, 4.0], [4.0, 3.5, 3.0, 2.5]),
        (ZERO_BUBBLE, 3, [4.0, 4.0, 4.0, 4.0], [4.0, 3.666666667, 3.333333333, 3.0]),
        (ZERO_BUBBLE, 4, [4.0, 4.0, 4.0, 4.0], [4.0, 3.75, 3.5, 3.25]),
        (ZBV, 2, [4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]),
    ],
)
def test_torchs_schedules_hold_the_published_memory(
    name: str, chunks: int, peak: list[float], until_input: list[float], folder: Path
) -> None:
    read = from_csv(written_by_torch(torch_schedule(name, Sizes(4, 8, chunks)), folder))
    held = (simulate(read, costs).peak for costs in (Costs(), Costs(until_W=0)))
    assert [[round(most, 9) for most in ranks] for ranks in held] == [peak, until_input]


@pytest.mark.parametrize(
    ("costs", "apart", "in_pairs"),
    [(UNITS, 25.5, 27.0), (SHORT_WEIGHTS, 26.15, 28.05), (MEASURED, 415.6785, 445.8655)],
)
def test_a_pair_that_is_read_as_two_sends_the_first_result_earlier(
    costs: Costs, apart: float, in_pairs: float, folder: Path
) -> None:
    """PyTorch sends both results of a pair when the pair has ended: `in_pairs`, as published, is longer."""
    read = from_csv(written_by_torch(torch_schedule(DUAL, Sizes(4, 8, 2)), folder))
    played = simulate(read, costs)
    assert played.makespan == played.span == apart < in_pairs
    assert played.peak == (4.5, 4.5, 4.5, 4.5)
