import pytest

from plait.loop.learning_rates import warmup_cosine, warmup_linear


def rates(steps: int, warmup: int) -> list[float]:
    return list(map(warmup_cosine(1.0, steps=steps, floor=0.1, warmup=warmup), range(steps)))


def test_climbs_to_the_peak_then_falls_to_the_floor() -> None:
    found = rates(steps=14, warmup=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[8] == pytest.approx(0.55)  # half of the way down
    assert found[-1] == pytest.approx(0.1)


def test_without_warm_up() -> None:
    found = rates(steps=10, warmup=0)
    assert 0.97 < found[0] < 1.0
    assert found[-1] == pytest.approx(0.1)


def test_shorter_than_its_warm_up() -> None:
    assert rates(steps=3, warmup=10) == pytest.approx([0.1, 0.2, 0.3])
    assert rates(steps=2, warmup=2) == [0.5, 1.0]


def test_beyond_the_last_step_it_stays_at_the_floor() -> None:
    assert warmup_cosine(1.0, steps=10, floor=0.1, warmup=2)(99) == pytest.approx(0.1)


def test_a_linear_decay() -> None:
    found = list(map(warmup_linear(1.0, steps=6, warmup=2), range(6)))
    assert found == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
