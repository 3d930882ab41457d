"""What commands that run ranks do with signals, imports and their number of ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from plait.app.cli.ranks_and_signals import end_rank, importing, local_ranks, stoppable
from plait.errors import ConfigError
from plait.ranks import launcher_environment
from plait.ranks.launch import fork_server
from plait.ranks.launch.rank_main_loop import STOP_SIGNAL

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of before, whatever a test leaves."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def of_launcher(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(
        launcher_environment,
        "find_world",
        lambda: SimpleNamespace(rank=rank, world_size=size, launcher="torchrun"),
    )


def test_a_first_import_is_left_out_of_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: told.append("frozen"))
    handler = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    with importing():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert gc.isenabled(), "torch was imported before"
    assert signal.getsignal(signal.SIGINT) == handler
    assert told == []
    monkeypatch.delitem(sys.modules, "torch")
    with suppress(KeyError), importing():
        assert not gc.isenabled()
        raise KeyError
    assert (gc.isenabled(), told) == (True, ["frozen"])
    gc.disable()
    try:
        with importing():
            pass
        assert (gc.isenabled(), told) == (False, ["frozen"]), "as the user has set it"
    finally:
        gc.enable()


def test_the_first_signal_to_the_command_is_sent_on_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also to those after one that has ended meanwhile, and to one whose fork server is lost."""
    sent: list[tuple[int, int]] = []
    children, of_lost_server = [SimpleNamespace(pid=pid) for pid in (71, None, 70)], [71, 72]
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)
    monkeypatch.setattr(fork_server, "started_processes", lambda: of_lost_server)

    def kill(pid: int, number: int) -> None:
        if pid == 70:
            raise ProcessLookupError
        sent.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    for number in SIGNALS:
        sent.clear()
        with stoppable(local=True) as received:
            signal.raise_signal(number)
            assert received == [number]
        assert sent == [(71, STOP_SIGNAL), (72, STOP_SIGNAL)]
        said = f"plait: {number.name}: stops after this step; once more stops at once.\n"
        assert capsys.readouterr().err == said
    children.clear()
    of_lost_server.clear()
    with pytest.raises(KeyboardInterrupt), stoppable(local=True) as received:
        signal.raise_signal(signal.SIGINT)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    with stoppable(local=True) as received_later:
        signal.raise_signal(signal.SIGTERM)
    assert (received, received_later, told) == ([], [], [signal.SIGTERM])
    assert capsys.readouterr().err == "", "no rank has started"
    before = signal.getsignal(signal.SIGTERM)
    with stoppable(local=False):
        assert signal.getsignal(signal.SIGTERM) == before, "a launcher hands it on itself"


def test_more_local_ranks_than_the_hosts_cores_allow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_environment, "find_world", lambda: None)
    for cores, most in ((1, 64), (None, 64), (9, 72)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        with local_ranks(most, "the plan") as prints:
            assert prints
        with (
            pytest.raises(
                ConfigError, match=rf"^the plan needs {most + 1} ranks, and .* at most {most}: low"
            ),
            local_ranks(most + 1, "the plan"),
        ):
            pass
    for rank in (0, 1):
        of_launcher(monkeypatch, rank, 100)
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with local_ranks(100, "the plan") as prints:
            assert prints == (rank == 0)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        signal.signal(signal.SIGTERM, before)
    with (
        pytest.raises(ConfigError, match=r"^the plan needs 99 ranks, but torchrun started 100: start 99, or"),
        local_ranks(99, "the plan"),
    ):
        pass


def test_a_terminated_command_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher_environment, "find_world", lambda: None)
    with pytest.raises(SystemExit) as ended, local_ranks(1, "the plan"):
        signal.raise_signal(signal.SIGTERM)
    assert (ended.value.code, capsys.readouterr().err) == (143, "plait: terminated.\n")


def test_a_rank_of_a_launcher_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(os, "_exit", told.append)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: told.append(name)))
    monkeypatch.setattr(launcher_environment, "find_world", lambda: None)
    end_rank(5)
    assert told == []
    of_launcher(monkeypatch, 1, 2)
    end_rank(5)
    assert told == ["stdout", "stderr", 5]
