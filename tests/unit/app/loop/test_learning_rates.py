import pytest

from plait.app.loop.learning_rate_schedules import (
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from plait.errors import ConfigError


def rates(steps: int, warmup: int) -> list[float]:
    return list(map(warmup_cosine(1.0, steps=steps, floor=0.1, warmup=warmup), range(steps)))


def test_warmup_cosine_climbs_to_the_peak_then_falls_to_the_floor() -> None:
    found = rates(steps=14, warmup=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[8] == pytest.approx(0.55)  # half of the way down
    assert found[-1] == pytest.approx(0.1)


def test_a_schedule_without_warm_up_starts_near_the_peak() -> None:
    found = rates(steps=10, warmup=0)
    assert 0.97 < found[0] < 1.0
    assert found[-1] == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up_only_climbs() -> None:
    assert rates(steps=3, warmup=10) == pytest.approx([0.1, 0.2, 0.3])
    assert rates(steps=2, warmup=2) == [0.5, 1.0]


def test_the_learning_rate_beyond_the_last_step_stays_at_the_floor() -> None:
    assert warmup_cosine(1.0, steps=10, floor=0.1, warmup=2)(99) == pytest.approx(0.1)


def test_warmup_linear_falls_to_zero_in_equal_steps() -> None:
    found = list(map(warmup_linear(1.0, steps=6, warmup=2), range(6)))
    assert found == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_constant_rate_after_the_warm_up() -> None:
    assert list(map(warmup_constant(2.0, warmup=2), range(4))) == [1.0, 2.0, 2.0, 2.0]


def test_a_stable_rate_falls_in_its_last_steps_alone() -> None:
    schedule = warmup_stable_decay(1.0, steps=10, warmup=2, decay=4, floor=0.2)
    assert list(map(schedule, range(10))) == pytest.approx([0.5, *[1.0] * 5, 0.8, 0.6, 0.4, 0.2])
    assert schedule(99) == pytest.approx(0.2)
    a_tenth = warmup_stable_decay(1.0, steps=30)
    assert list(map(a_tenth, range(26, 30))) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    with pytest.raises(ConfigError, match="warmup = 7 and decay = 4 are more than steps = 10 together"):
        warmup_stable_decay(1.0, steps=10, warmup=7, decay=4)
