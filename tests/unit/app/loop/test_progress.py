import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from plait.app.loop.builtin_callbacks import Progress


def follow(*, shown: bool = True, bar: bool = True, terminal: bool = False, seconds: float = 1.0) -> str:
    """What 20 steps that take `seconds` each print."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, markup=False)

    def clock() -> Iterator[float]:
        now = 0.0
        yield now  # begun
        while True:
            now += seconds
            yield now

    ticks = clock()
    progress = Progress(shown=shown, bar=bar, console=console, clock=lambda: next(ticks))
    run: Any = SimpleNamespace(steps=20, done=0)
    progress.begin(run)
    run.tell("[hello]")
    for step in range(1, 21):
        progress.measured(run, {"step": step, "loss": 5.0 - step / 10, "tokens_per_second": 1000.0})
    progress.end(run, None)
    return out.getvalue()


def test_progress_lines_come_every_few_seconds() -> None:
    lines = follow().splitlines()
    assert lines[0] == "[hello]"
    assert lines[1] == "step 1/20  loss 4.900  1,000 tokens/s  0:00:19 left"
    assert [line.split()[1] for line in lines[1:]] == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    assert lines[-1] == "step 20/20  loss 3.000  1,000 tokens/s  0:00:00 left"


def test_progress_of_quick_steps_prints_the_first_and_last_line() -> None:
    assert [line.split()[1] for line in follow(seconds=0.01).splitlines()[1:]] == ["1/20", "20/20"]


def test_on_a_terminal_progress_is_a_bar() -> None:
    printed = follow(terminal=True)
    assert "[hello]" in printed
    for part in ("step 20/20", "loss 3.000", "1,000 tokens/s", "left"):
        assert part in printed
    assert "━" in printed


def test_on_a_terminal_progress_is_lines_if_asked_for() -> None:
    printed = follow(terminal=True, bar=False)
    assert "━" not in printed
    assert "step 20/20  loss 3.000" in printed


def test_ranks_other_than_0_show_no_progress() -> None:
    assert follow(shown=False) == follow(shown=False, terminal=True) == ""
