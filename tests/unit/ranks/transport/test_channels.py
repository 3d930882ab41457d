"""Messages between ranks of one host, here in one process: no call blocks unless a message is missing."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from plait.ranks.transport.shared_memory.group_socket_messages import Channels
from plait.ranks.transport.shared_memory.peer_sockets import ChannelMessage, Listener, PeerChannel

OWN = ChannelMessage(-1)


def joined(size: int, *, timeout: float = 10.0, label: str = "tp") -> list[Channels]:
    listeners = [Listener() for _ in range(size)]
    names = [listener.name for listener in listeners]
    return [Channels(listener, names, index, label, timeout) for index, listener in enumerate(listeners)]


def values(messages: list[ChannelMessage]) -> list[int]:
    return [message.value for message in messages]


def test_messages_of_all_peers_are_received_in_order_of_their_index():
    channels = joined(3)
    for index, channel in enumerate(channels):
        channel.send(channel.next_sequence(), 10 + index)
    assert [values(channel.receive(0, OWN)) for channel in channels] == [
        [-1, 11, 12],
        [10, -1, 12],
        [10, 11, -1],
    ]


def test_sequence_numbers_may_be_received_in_any_order():
    a, b = joined(2)
    for value in (5, 6, 7):
        a.send(a.next_sequence(), value)
    sequences = [b.next_sequence() for _ in range(3)]
    assert [values(b.receive(sequence, OWN)) for sequence in reversed(sequences)] == [
        [7, -1],
        [6, -1],
        [5, -1],
    ]


def test_a_rank_sends_before_the_other_has_channels():
    listeners = [Listener(), Listener()]
    names = [listener.name for listener in listeners]
    first = Channels(listeners[0], names, 0, "tp", 10.0)
    first.send(first.next_sequence(), 3)
    second = Channels(listeners[1], names, 1, "tp", 10.0)
    second.send(second.next_sequence(), 4)
    assert (values(first.receive(0, OWN)), values(second.receive(0, OWN))) == ([-1, 4], [3, -1])


def test_groups_at_one_listener_are_separate():
    listeners = [Listener(), Listener()]
    names = [listener.name for listener in listeners]
    tp, dp = (
        [Channels(listener, names, i, label, 10.0) for i, listener in enumerate(listeners)]
        for label in ("tp", "dp")
    )
    tp[0].send(tp[0].next_sequence(), 1)
    dp[0].send(dp[0].next_sequence(), 2)
    assert values(dp[1].receive(0, OWN)) == [2, -1]
    assert values(tp[1].receive(0, OWN)) == [1, -1]


def test_a_file_descriptor_is_sent_with_a_message():
    a, b = joined(2)
    read, write = os.pipe()
    a.send(a.next_sequence(), 1, write)
    os.close(write)
    descriptor = b.receive(b.next_sequence(), OWN)[0].descriptor
    assert descriptor is not None
    assert not os.get_inheritable(descriptor)  # a program that the rank starts does not keep it open
    os.write(descriptor, b"here")
    assert os.read(read, 4) == b"here"
    os.close(descriptor)
    os.close(read)


def test_a_peer_that_is_gone_is_an_error_but_its_messages_are_received():
    a, b = joined(2)
    a.send(a.next_sequence(), 1)
    a.close()
    assert values(b.receive(b.next_sequence(), OWN)) == [1, -1]
    b.send(b.next_sequence())  # no error: receiving raises it
    with pytest.raises(ConnectionError, match="closed by peer"):
        b.receive(1, OWN)


def test_a_peer_that_closed_its_listener_before_connecting_is_an_error_at_once():
    listeners = [Listener(), Listener()]
    names = [listener.name for listener in listeners]
    for close_first in (False, True):
        if close_first:
            listeners[1].close()
        channels = Channels(listeners[0], names, 0, f"tp {close_first}", 60.0)
        listeners[1].close()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="closed by peer"):
            channels.receive(channels.next_sequence(), OWN)
        assert time.monotonic() - began < 30


def test_a_closed_peer_is_an_error_although_a_third_rank_is_silent():
    a, b, c = joined(3, timeout=60.0)
    b.close()
    with pytest.raises(ConnectionError, match="closed by peer"):
        a.receive(a.next_sequence(), OWN)  # c is there, and silent
    with pytest.raises(ConnectionError, match="closed by peer"):
        c.receive(c.next_sequence(), OWN)


def test_a_timeout_closes_the_channels_for_all():
    a, b = joined(2, timeout=0.05)
    with pytest.raises(TimeoutError, match="timed out"):
        a.receive(a.next_sequence(), OWN)
    with pytest.raises(ConnectionError, match=r"an operation before it failed \(timed out"):
        a.send(a.next_sequence())
    with pytest.raises(ConnectionError, match="closed by peer"):
        b.receive(b.next_sequence(), OWN)


def test_using_closed_channels_is_an_error():
    a, _ = joined(2)
    a.close()
    with pytest.raises(ConnectionError, match="the mesh is closed"):
        a.send(a.next_sequence())


def test_more_messages_than_the_send_buffer_holds_arrive_in_order():
    a, b = joined(2)
    count = 3000

    def send_all() -> None:
        for value in range(count):
            a.send(a.next_sequence(), value)

    sender = threading.Thread(target=send_all)
    sender.start()
    time.sleep(0.1)
    received = [b.receive(b.next_sequence(), OWN)[0].value for _ in range(count)]
    sender.join()
    assert received == list(range(count))


def test_a_peer_that_never_receives_is_an_error_after_the_timeout():
    a, _b = joined(2, timeout=0.1)

    def send_all() -> None:
        for _ in range(100_000):
            a.send(a.next_sequence())

    with pytest.raises(TimeoutError):
        send_all()


def test_a_peer_that_closes_while_there_is_no_room_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    a, b = joined(2)
    b.send(b.next_sequence(), 1)
    assert values(a.receive(a.next_sequence(), OWN)) == [-1, 1]
    with monkeypatch.context() as patched:
        patched.setattr(PeerChannel, "send", lambda *_: b.close())  # None: there was no room
        a.send(a.next_sequence())  # no error: receiving raises it
    with pytest.raises(ConnectionError, match="closed by peer"):
        a.receive(1, OWN)


def test_both_send_more_than_the_send_buffer_holds():
    channels = joined(2)
    received: dict[int, list[int]] = {}

    def exchange(channel: Channels) -> None:
        for value in range(2000):
            channel.send(channel.next_sequence(), value)
        received[channel.index] = [
            channel.receive(sequence, OWN)[1 - channel.index].value for sequence in range(2000)
        ]

    threads = [threading.Thread(target=exchange, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == {0: list(range(2000)), 1: list(range(2000))}


def test_the_next_message_carries_the_acknowledgement():
    a, b = joined(2)
    first = [a.next_sequence(), b.next_sequence()][0]
    b.send(first)
    a.receive(first, OWN)
    a.acknowledge(first)
    b.acknowledge(first)
    assert not a.is_acknowledged(first)
    b.send(b.next_sequence())
    a.receive(a.next_sequence(), OWN)
    assert a.is_acknowledged(first)


def test_an_acknowledgement_is_sent_while_later_operations_are_pending():
    a, b = joined(2)
    first, second, third = ([a.next_sequence(), b.next_sequence()][0] for _ in range(3))
    b.acknowledge(second)  # the first is not, so nothing up to it is
    b.acknowledge(first)
    a.wait_acknowledged(second)
    a.acknowledge(first, second)
    assert a.is_acknowledged(first)
    assert a.is_acknowledged(second)
    assert not a.is_acknowledged(third)


def test_a_listener_does_not_take_an_unnamed_connection_for_a_peer():
    listener = Listener()
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(b"\0" + listener.name.encode())
    listener.accept_pending()
    assert listener.pop_connection("plait-peer-tp-0") is None
    stranger.close()


def test_closed_channels_leave_no_open_file_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    channels = joined(3)
    with open(os.devnull) as file:
        channels[0].send(channels[0].next_sequence(), 0, file.fileno())
    channels[2].close()
    with pytest.raises(ConnectionError):
        channels[1].receive(channels[1].next_sequence(), OWN)
    del channels
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_connection_made_during_a_receive_is_accepted(monkeypatch: pytest.MonkeyPatch):
    listeners = [Listener() for _ in range(3)]
    names = [listener.name for listener in listeners]
    listening = Channels(listeners[0], names, 0, "tp", 5.0)
    late: list[Channels] = []
    ordinary = PeerChannel.receive_pending

    def others_connect(channel: PeerChannel) -> None:
        """The first peer has sent nothing; then both connect, before the second is received from."""
        ordinary(channel)
        if not late:
            late.extend(Channels(listeners[index], names, index, "tp", 5.0) for index in (1, 2))
            for channels in late:
                channels.send(channels.next_sequence(), channels.index)

    monkeypatch.setattr(PeerChannel, "receive_pending", others_connect)
    assert values(listening.receive(listening.next_sequence(), OWN)) == [-1, 1, 2]
