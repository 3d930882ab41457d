"""Goodput: formula, simulation and the best interval agree; limits are what they must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.estimate.time.goodput import (
    Failures,
    best_interval,
    expected_goodput,
    simulated_goodput,
    young_interval,
)

FAILURES = st.builds(
    Failures,
    mean_time=st.floats(600.0, 1e7),
    checkpoint=st.floats(0.1, 120.0),
    restart=st.floats(0.0, 600.0),
)


@given(FAILURES)
def test_no_other_checkpoint_interval_has_higher_expected_goodput(failures: Failures) -> None:
    best = best_interval(failures)
    for factor in (0.1, 0.8, 0.99, 1.01, 1.2, 10.0):
        assert expected_goodput(failures, best.interval * factor) <= best.expected * (1 + 1e-9)
    assert 0 < best.expected < 1


def test_simulated_goodput_agrees_with_the_formula() -> None:
    """Its standard error is that of the means of other seeds."""
    for mean_time in [1800.0, 1e5]:
        failures = Failures(mean_time, checkpoint=30.0, restart=300.0)
        for interval in (100.0, 1000.0):
            expected = expected_goodput(failures, interval)
            found = [simulated_goodput(failures, interval, seed) for seed in range(12)]
            assert abs(found[1][0] - expected) < 5 * found[1][1]
            spread = sum((simulated - expected) ** 2 for simulated, _ in found) / 12
            assert 0.3 < spread / found[1][1] ** 2 < 3


def test_where_failures_are_rare_youngs_estimate_is_near() -> None:
    failures = Failures(1e8, checkpoint=10.0, restart=100.0)
    assert best_interval(failures).interval == pytest.approx(young_interval(failures), rel=1e-2)


def test_the_seed_decides_the_simulated_failures() -> None:
    failures = Failures(3600.0, 30.0, 300.0)
    found = best_interval(failures, 1)
    assert found == best_interval(failures, 1) != best_interval(failures, 2)
    assert (found.simulated, found.deviation) == simulated_goodput(failures, found.interval, 1)
    assert (found.expected, found.seed) == (expected_goodput(failures, found.interval), 1)


def test_an_interval_that_no_run_ends_has_no_goodput() -> None:
    failures = Failures(1.0, checkpoint=30.0, restart=30.0)
    assert simulated_goodput(failures, 30.0, seed=0) == (0.0, 0.0)
    assert expected_goodput(failures, 640.0 + 0.01) == 0.0 < expected_goodput(failures, 639.0)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["mean_time", "checkpoint", "restart"])
def test_negative_infinite_or_nan_times_of_failures_are_refused(name: str, value: float) -> None:
    times = {"mean_time": 1.0, "checkpoint": 0.0, "restart": 0.0}
    with pytest.raises(PlanError, match=f"{name} is {value} seconds: give at least 0"):
        Failures(**times | {name: value})
    with pytest.raises(PlanError, match=r"mean_time is 0.0 seconds: .*above 0"):
        Failures(**times | {"mean_time": 0.0})
