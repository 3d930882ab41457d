"""From one living layout to another: the same bits, each byte sent once, and it goes on as from a file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import plait
from parity.checkpoints import LAYOUTS, Run, plan_of, run_of, tensors_of
from parity.pairs import in_quick
from parity.resharding import begun, bytes_that_differ, moved, trips
from parity.test_checkpoints import check_close, check_same_bits
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

TWELVE = [name for name in LAYOUTS if name not in ("dp", "full", "tp-3", "cp", "cp-4")]
assert len(TWELVE) == 12


def world_of(*names: str) -> int:
    return max(LAYOUTS[name].world for name in names)


def there_and_on(before: str, after: str, folder: str) -> None:
    """Train, save, move, save what has moved, go on, and save again."""
    run = begun(plan_of(before))
    if run is not None:
        run.train(range(2))
        plait.save(run.engine, run.optimizer, f"{folder}/before")
    run, _ = moved(run, plan_of(after))
    if run is not None:
        plait.save(run.engine, run.optimizer, f"{folder}/moved")
        run.train(range(2, 4))
        plait.save(run.engine, run.optimizer, f"{folder}/on")
        run.engine.check_replicas(run.optimizer)


def loaded_and_on(after: str, folder: str) -> None:
    with run_of(plan_of(after)) as run:
        plait.load(run.engine, run.optimizer, f"{folder}/before")
        run.train(range(2, 4))
        plait.save(run.engine, run.optimizer, f"{folder}/loaded-on")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zb-v", "tp-3"),
        ("full-4", "tp"),
        ("one", "full"),
        ("cp-tp", "all"),
        ("all", "cp-hybrid"),
        ("hybrid", "pp-optimizer"),
        ("tp-gradients", "one"),
        ("cp-4", "dp"),
    ],
)
def test_a_run_moved_to_another_layout_goes_on_as_from_a_checkpoint(
    thread_ranks: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    thread_ranks.run(there_and_on, before, after, str(tmp_path), ranks=world_of(before, after))
    check_same_bits(tensors_of(tmp_path / "before"), tensors_of(tmp_path / "moved"))
    thread_ranks.run(loaded_and_on, after, str(tmp_path), ranks=LAYOUTS[after].world)
    check_same_bits(tensors_of(tmp_path / "loaded-on"), tensors_of(tmp_path / "on"))


def check_trips(pool: RankPool, before: str, afters: list[str]) -> None:
    told = pool.run(trips, before, afters, ranks=world_of(before, *afters))
    for number, after in enumerate(afters):
        there, back, unlike = zip(*(one[number] for one in told), strict=True)
        assert not any(unlike), (before, after, unlike)
        assert sum(there) == bytes_that_differ(before, after), (before, after)
        assert sum(back) == bytes_that_differ(after, before), (after, before)


def test_exactly_the_bytes_that_differ_are_sent_and_the_way_back_gives_the_same_bits(
    thread_ranks: RankPool,
) -> None:
    check_trips(thread_ranks, "pp", ["tp-gradients", "hybrid"])


@pytest.mark.full
@pytest.mark.parametrize("before", TWELVE)
def test_between_all_of_twelve_layouts_exactly_the_bytes_that_differ_are_sent(
    thread_ranks: RankPool, before: str
) -> None:
    check_trips(thread_ranks, before, TWELVE[TWELVE.index(before) :])


CHANGING = {
    "quick": [Plan(pp=2, dp=2, strategy="full"), Plan(tp=3), Plan(pp=2), Plan(dp=4)],
    "strategies": [
        Plan(dp=4, strategy="full", reduce="each"),
        Plan(pp=3, schedule="zb-h1"),
        Plan(dp=2, strategy="gradients"),
        Plan(pp=2, tp=2, schedule="zb-v"),
    ],
    "contexts": [
        Plan(cp=2, tp=2, strategy="optimizer"),
        Plan(tp=3, sequence_parallel="keep"),
        Plan(cp=2, strategy="full"),
        Plan(dp=4, replicate=2, strategy="full"),
    ],
}
"""Plans of 4, 3, 2 and 4 ranks, one after another."""


def changing(kind: str, steps: int, folder: str) -> list[float]:
    """A run of `steps` steps over all plans, each for the same share of them; its losses."""
    plans = CHANGING[kind]
    bounds = [steps * number // len(plans) for number in range(len(plans) + 1)]
    run: Run | None = None
    losses: list[float] = []
    for number, (plan, (first, stop)) in enumerate(zip(plans, pairwise(bounds), strict=True)):
        plan = plait.Plan(**{**vars(plan), "microbatches": 4 // plan.dp, "precision": "fp64"})
        run = begun(plan) if number == 0 else moved(run, plan)[0]
        if run is not None:
            run.train(range(first, stop))
            losses += run.losses
    if run is not None:
        plait.save(run.engine, run.optimizer, folder)
    return losses


def undisturbed(steps: int, folder: str) -> list[float]:
    with run_of(plan_of("one")) as run:
        run.train(range(steps))
        plait.save(run.engine, run.optimizer, folder)
        return run.losses


@pytest.mark.parametrize("kind", in_quick(CHANGING, "quick"))
def test_a_run_that_loses_ranks_and_wins_them_back_computes_what_one_rank_would(
    thread_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    steps = 8 if kind == "quick" else 24
    losses = thread_ranks.run(changing, kind, steps, str(tmp_path / "changed"), ranks=4)[0]
    whole = thread_ranks.run(undisturbed, steps, str(tmp_path / "one"), ranks=1)[0]
    assert losses == pytest.approx(whole, rel=1e-12)
    check_close(tensors_of(tmp_path / "changed"), tensors_of(tmp_path / "one"), 1e-12)
