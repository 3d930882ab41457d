"""A rank at half speed is named within 20 steps, on noisy machines too; a rank that is not slow never is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median_low

import pytest

from parity.pairs import in_turns
from plait.app.loop.slow_ranks import SlowRanks

STEPS, WINDOWS = 4, 3
"""Steps of a window, and windows after which a rank may be named."""
PEERS = {
    "pairs": [0, 0],
    "four alike": [0, 0, 0, 0],
    "two stages": [0, 0, 1, 1],
    "none": [0, 1],
    "four": [0, 1, 2, 3],
}
NOISES = {"quiet": 0.02, "noisy": 0.12}
"""Standard deviations of the logarithm of a step's time."""
Slow = Callable[[int, int], float]


def step_time(draw: random.Random, noise: float) -> float:
    """A step's time around 1; one in ten is disturbed, and up to four times as long."""
    disturbed = draw.uniform(1, 4) if draw.random() < 0.1 else 1.0
    return draw.lognormvariate(0, noise) * disturbed


def run(
    places: Sequence[int],
    steps: int,
    slow: Slow,
    *,
    noise: float,
    seed: int = 0,
    predicted: Sequence[float] = (),
) -> list[tuple[int, list[int], list[int]]]:
    """Return for each window its last step, the ranks found slow in it, and those that no longer are."""
    draw = random.Random(seed)
    ranks = SlowRanks(places, predicted or [1.0] * len(places), WINDOWS)
    told = []
    for first in range(1, steps + 1, STEPS):
        seconds = [
            median_low(step_time(draw, noise) * slow(rank, step) for step in range(first, first + STEPS))
            for rank in range(len(places))
        ]
        found, ended = ranks.add(first, seconds, step=3.0)
        told.append((first + STEPS - 1, [one.rank for one in found], ended))
    return told


def half_speed(rank: int, since: int) -> Slow:
    return lambda other, step: 2.0 if other == rank and step >= since else 1.0


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("peers", PEERS)
def test_a_rank_at_half_speed_is_named_within_20_steps_and_no_other_is(peers: str, noise: str) -> None:
    places = PEERS[peers]
    for seed in range(20):
        rank, since = seed % len(places), 21 + seed
        told = run(places, 80, half_speed(rank, since), noise=NOISES[noise], seed=seed)
        named = {one: step for step, found, _ in told for one in found}
        assert named.keys() == {rank}, (seed, named)
        assert since < named[rank] < since + 20


@pytest.mark.parametrize("peers", PEERS)
def test_a_rank_that_is_slow_from_the_first_step_is_named_within_20_steps(peers: str) -> None:
    told = run(PEERS[peers], 20, half_speed(1, 1), noise=0.02)
    assert [found for _, found, _ in told if found] == [[1]]


@pytest.mark.parametrize(
    ("peers", "noise"), in_turns({name: name for name in PEERS}, {name: name for name in NOISES})
)
def test_nobody_is_named_in_ten_thousand_ordinary_steps(peers: str, noise: str) -> None:
    told = run(PEERS[peers], 10_000, lambda rank, step: 1.0, noise=NOISES[noise], seed=7)
    assert not any(found for _, found, _ in told)


def test_two_disturbed_windows_in_a_row_name_nobody() -> None:
    def disturbed(rank: int, step: int) -> float:
        return 8.0 if rank == 1 and step % 32 in range(1, 9) else 1.0

    told = run([0, 0, 0], 600, disturbed, noise=0.02)
    assert not any(found for _, found, _ in told)


def test_a_rank_that_is_no_longer_slow_is_told_so_and_may_be_named_again() -> None:
    told = run([0, 0, 0], 120, lambda rank, step: 2.0 if rank == 2 and step % 60 > 20 else 1.0, noise=0.02)
    assert [(step, found, ended) for step, found, ended in told if found or ended] == [
        (32, [2], []),
        (72, [], [2]),
        (92, [2], []),
    ]


def test_a_rank_without_peers_is_measured_by_its_own_first_windows() -> None:
    """Layers that cost 1.4 times what was predicted make no rank slow; twice its own time does."""
    wrong = [1.0, 1.0 / 1.4]
    assert not any(found for _, found, _ in run([0, 1], 400, lambda *_: 1.0, noise=0.02, predicted=wrong))
    told = run([0, 1], 60, half_speed(0, 31), noise=0.02, predicted=wrong)
    assert [(step, found) for step, found, _ in told if found] == [(44, [0])]


def test_factor_and_first_step_of_a_slow_rank() -> None:
    ranks = SlowRanks([0, 0, 0], [1, 1, 1], WINDOWS)
    for first in range(1, 61, STEPS):
        factor = 1.7 if first > 32 else 1.0
        found, _ = ranks.add(first, [1.0, factor, 1.01], step=2.0)
        if found:
            break
    (one,) = found
    assert (one.rank, one.since, first) == (1, 33, 41)
    assert one.factor == pytest.approx(1.7, rel=0.01)
    assert ranks.ratios[1] == pytest.approx(1.7, rel=0.01)


def test_what_costs_a_step_next_to_nothing_is_not_named() -> None:
    told = SlowRanks([0, 0, 0], [1, 1, 1], WINDOWS)
    assert not any(told.add(first, [1.0, 2.0, 1.0], step=100.0)[0] for first in range(1, 200, STEPS))


def test_more_windows_are_needed_where_disturbances_last_longer() -> None:
    ranks = SlowRanks([0, 0], [1, 1], 20)
    named = [first for first in range(1, 300, STEPS) if ranks.add(first, [1.0, 2.0], step=1.0)[0]]
    assert named == [1 + 19 * STEPS]
