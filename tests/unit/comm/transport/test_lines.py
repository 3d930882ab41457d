"""Words between ranks of one host, here in one process: nobody waits unless a word is missing."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from plait.comm.transport.shared_memory.door import Door
from plait.comm.transport.shared_memory.line import Line, Word
from plait.comm.transport.shared_memory.lines import Lines

OWN = Word(-1)


def joined(size: int, *, timeout: float = 10.0, label: str = "tp") -> list[Lines]:
    doors = [Door() for _ in range(size)]
    names = [door.name for door in doors]
    return [Lines(door, names, index, label, timeout) for index, door in enumerate(doors)]


def values(words: list[Word]) -> list[int]:
    return [word.value for word in words]


def test_words_are_heard_in_order_of_the_index():
    lines = joined(3)
    for index, line in enumerate(lines):
        line.say(line.ticket(), 10 + index)
    assert [values(line.hear(0, OWN)) for line in lines] == [[-1, 11, 12], [10, -1, 12], [10, 11, -1]]


def test_tickets_may_be_heard_in_any_order():
    a, b = joined(2)
    for value in (5, 6, 7):
        a.say(a.ticket(), value)
    tickets = [b.ticket() for _ in range(3)]
    assert [values(b.hear(ticket, OWN)) for ticket in reversed(tickets)] == [[7, -1], [6, -1], [5, -1]]


def test_a_rank_speaks_before_the_other_has_lines():
    doors = [Door(), Door()]
    names = [door.name for door in doors]
    first = Lines(doors[0], names, 0, "tp", 10.0)
    first.say(first.ticket(), 3)
    second = Lines(doors[1], names, 1, "tp", 10.0)
    second.say(second.ticket(), 4)
    assert (values(first.hear(0, OWN)), values(second.hear(0, OWN))) == ([-1, 4], [3, -1])


def test_groups_at_one_door_do_not_hear_each_other():
    doors = [Door(), Door()]
    names = [door.name for door in doors]
    tp, dp = ([Lines(door, names, i, label, 10.0) for i, door in enumerate(doors)] for label in ("tp", "dp"))
    tp[0].say(tp[0].ticket(), 1)
    dp[0].say(dp[0].ticket(), 2)
    assert values(dp[1].hear(0, OWN)) == [2, -1]
    assert values(tp[1].hear(0, OWN)) == [1, -1]


def test_a_file_travels_with_a_word():
    a, b = joined(2)
    read, write = os.pipe()
    a.say(a.ticket(), 1, write)
    os.close(write)
    descriptor = b.hear(b.ticket(), OWN)[0].descriptor
    assert descriptor is not None
    os.write(descriptor, b"here")
    assert os.read(read, 4) == b"here"
    os.close(descriptor)
    os.close(read)


def test_a_peer_that_is_gone_is_an_error_but_what_it_said_is_heard():
    a, b = joined(2)
    a.say(a.ticket(), 1)
    a.close()
    assert values(b.hear(b.ticket(), OWN)) == [1, -1]
    b.say(b.ticket())  # nobody hears it; hearing tells
    with pytest.raises(ConnectionError, match="closed by peer"):
        b.hear(1, OWN)


def test_a_peer_that_never_came_and_closed_its_door_is_an_error_at_once():
    doors = [Door(), Door()]
    names = [door.name for door in doors]
    for close_first in (False, True):
        if close_first:
            doors[1].close()
        lines = Lines(doors[0], names, 0, f"tp {close_first}", 60.0)
        doors[1].close()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="closed by peer"):
            lines.hear(lines.ticket(), OWN)
        assert time.monotonic() - began < 30


def test_one_of_three_is_gone():
    a, b, c = joined(3, timeout=60.0)
    b.close()
    with pytest.raises(ConnectionError, match="closed by peer"):
        a.hear(a.ticket(), OWN)  # c is there, and silent
    with pytest.raises(ConnectionError, match="closed by peer"):
        c.hear(c.ticket(), OWN)


def test_silence_is_an_error_and_ends_the_lines_for_all():
    a, b = joined(2, timeout=0.05)
    with pytest.raises(TimeoutError, match="timed out"):
        a.hear(a.ticket(), OWN)
    with pytest.raises(ConnectionError, match=r"an operation before it failed \(timed out"):
        a.say(a.ticket())
    with pytest.raises(ConnectionError, match="closed by peer"):
        b.hear(b.ticket(), OWN)


def test_closed_lines_say_so():
    a, _ = joined(2)
    a.close()
    with pytest.raises(ConnectionError, match="the mesh is closed"):
        a.say(a.ticket())


def test_more_words_than_the_system_keeps():
    a, b = joined(2)
    count = 3000

    def speak() -> None:
        for value in range(count):
            a.say(a.ticket(), value)

    speaker = threading.Thread(target=speak)
    speaker.start()
    time.sleep(0.1)
    heard = [b.hear(b.ticket(), OWN)[0].value for _ in range(count)]
    speaker.join()
    assert heard == list(range(count))


def test_a_peer_that_never_listens_is_an_error_after_the_timeout():
    a, _b = joined(2, timeout=0.1)

    def speak() -> None:
        for _ in range(100_000):
            a.say(a.ticket())

    with pytest.raises(TimeoutError):
        speak()


def test_both_speak_more_than_the_other_has_heard():
    lines = joined(2)
    heard: dict[int, list[int]] = {}

    def talk(line: Lines) -> None:
        for value in range(2000):
            line.say(line.ticket(), value)
        heard[line.index] = [line.hear(ticket, OWN)[1 - line.index].value for ticket in range(2000)]

    threads = [threading.Thread(target=talk, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {0: list(range(2000)), 1: list(range(2000))}


def test_what_is_finished_is_known_with_the_next_word():
    a, b = joined(2)
    first = [a.ticket(), b.ticket()][0]
    b.say(first)
    a.hear(first, OWN)
    a.finish(first)
    b.finish(first)
    assert not a.finished(first)
    b.say(b.ticket())
    a.hear(a.ticket(), OWN)
    assert a.finished(first)


def test_what_is_finished_is_told_where_others_are_under_way():
    a, b = joined(2)
    first, second, third = ([a.ticket(), b.ticket()][0] for _ in range(3))
    b.finish(second)  # says that the first is not: nothing below it is finished
    b.finish(first)
    a.hear_finished(second)
    a.finish(first, second)
    assert a.finished(first)
    assert a.finished(second)
    assert not a.finished(third)


def test_a_stranger_is_not_taken_for_a_peer():
    door = Door()
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(b"\0" + door.name.encode())
    door.open()
    assert door.take("plait-peer-tp-0") is None
    stranger.close()


def test_descriptors_are_given_back():
    before = len(os.listdir("/proc/self/fd"))
    lines = joined(3)
    with open(os.devnull) as file:
        lines[0].say(lines[0].ticket(), 0, file.fileno())
    lines[2].close()
    with pytest.raises(ConnectionError):
        lines[1].hear(lines[1].ticket(), OWN)
    del lines
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_calls_while_another_is_listened_to_is_heard(monkeypatch: pytest.MonkeyPatch):
    doors = [Door() for _ in range(3)]
    names = [door.name for door in doors]
    listening = Lines(doors[0], names, 0, "tp", 5.0)
    late: list[Lines] = []
    ordinary = Line.listen

    def others_call_meanwhile(line: Line) -> None:
        """The first peer is found to be silent; then both call, before the second is listened to."""
        ordinary(line)
        if not late:
            late.extend(Lines(doors[index], names, index, "tp", 5.0) for index in (1, 2))
            for lines in late:
                lines.say(lines.ticket(), lines.index)

    monkeypatch.setattr(Line, "listen", others_call_meanwhile)
    assert values(listening.hear(listening.ticket(), OWN)) == [-1, 1, 2]
