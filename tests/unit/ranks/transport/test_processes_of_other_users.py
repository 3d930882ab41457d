"""What processes of other users of a host can do to the channels of ranks: nothing but cost some time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from strangers import (
    NEEDS_TWO_USERS,
    abstract_names,
    connect_for_ever,
    fill_backlogs,
    process_of_another_user,
    take_name,
    unix_socket,
)

from plait.ranks.transport.shared_memory.group_socket_messages import Channels
from plait.ranks.transport.shared_memory.peer_sockets import ChannelMessage, Listener

pytestmark = NEEDS_TWO_USERS
OWN = ChannelMessage(-1)


def exchanged(listeners: list[Listener], timeout: float = 20.0) -> list[list[int]]:
    """Each rank, a thread, opens its channels and exchanges a number with the others."""
    names, received = [listener.name for listener in listeners], {}

    def exchange(index: int) -> None:
        channels = Channels(listeners[index], names, index, "tp", timeout)
        channels.send(channels.next_sequence(), 10 + index)
        received[index] = [message.value for message in channels.receive(0, OWN)]

    threads = [threading.Thread(target=exchange, args=(index,), daemon=True) for index in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return [received[index] for index in sorted(received)]


@pytest.mark.parametrize("attack", [fill_backlogs, connect_for_ever])
def test_ranks_connect_although_another_user_fills_their_backlogs(
    attack: Callable[[Sequence[str]], object],
) -> None:
    listeners = [Listener(), Listener()]
    with process_of_another_user(lambda: attack([one.name for one in listeners]), patience=0.3):
        assert exchanged(listeners) == [[-1, 11], [10, -1]]


def test_a_full_backlog_that_nobody_empties_is_an_error_after_the_timeout():
    listeners = [Listener(), Listener()]
    names = [listener.name for listener in listeners]
    with process_of_another_user(lambda: fill_backlogs(names[:1])):
        channels = Channels(listeners[1], names, 1, "tp", 0.1)
        with pytest.raises(TimeoutError, match="timed out"):
            channels.send(channels.next_sequence())


def test_another_user_cannot_take_the_name_of_a_connection_first():
    """Names made of those that another user can see are taken before the ranks connect."""
    listeners = [Listener(), Listener()]
    own = {listener.name for listener in listeners}

    def squat() -> list[object]:
        return [take_name(f"{name}-tp-{index}") for name in own & abstract_names() for index in range(2)]

    with process_of_another_user(squat):
        assert exchanged(listeners) == [[-1, 11], [10, -1]]


def test_a_listener_of_another_user_is_no_peer():
    """It took the name of a rank's listener after that rank had ended."""
    own, gone = Listener(), Listener()
    names = [own.name, gone.name]
    gone.close()
    with process_of_another_user(lambda: take_name(names[1])):
        channels = Channels(own, names, 0, "tp", 20.0)
        channels.send(channels.next_sequence(), 1)
        with pytest.raises(ConnectionError, match="closed by peer"):
            channels.receive(0, OWN)


def test_a_connection_of_another_user_is_no_peer():
    own, peer = Listener(), Listener()
    names = [own.name, peer.name]

    def pretend() -> list[object]:
        connection = unix_socket()
        connection.connect(b"\0" + names[0].encode())
        connection.send(f"{names[1]}-tp-0".encode())
        return [connection]

    with process_of_another_user(pretend):
        own.accept_pending()
        assert own.pop_connection(f"{names[1]}-tp-0") is None
