from collections.abc import Callable

import pytest
import torch

from plait.errors import CommunicationError
from plait.ranks import Count, Group, Mesh, Traffic, receive, send

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.int16, torch.float8_e4m3fn]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0)], ids=str)
def test_messages_of_every_dtype_and_shape_arrive(rank_pool, shape):
    def body():
        group = Mesh(pp=2).group("pp")
        arrived = []
        for dtype in DTYPES:
            tensor = torch.ones(shape).to(dtype)
            if group.index == 0:
                send(tensor, group, 1).wait()
            else:
                buffer = torch.zeros(shape).to(dtype)
                arrived.append(
                    receive(buffer, group, 0).wait() is buffer and torch.equal(buffer.float(), tensor.float())
                )
        return arrived

    assert rank_pool.run(body, ranks=2)[1] == [True] * len(DTYPES)


def test_strided_tensors_are_sent_and_received(rank_pool):
    def body():
        group = Mesh(pp=2).group("pp")
        tensor = torch.arange(6.0).view(2, 3).t()
        if group.index == 0:
            return send(tensor, group, 1).wait()
        buffer = torch.zeros(2, 3).t()
        receive(buffer, group, 0).wait()
        return torch.equal(buffer, tensor)

    assert rank_pool.run(body, ranks=2) == [None, True]


def test_messages_keep_their_order_and_their_tag(rank_pool):
    def body():
        group = Mesh(pp=2).group("pp")
        if group.index == 0:
            handles = [send(torch.full((3,), float(i)), group, 1, tag=i % 2) for i in range(6)]
            return [handle.wait() for handle in handles]
        order = [1, 3, 5, 0, 2, 4]
        handles = [receive(torch.empty(3), group, 0, tag=i % 2) for i in order]
        return [handle.wait()[0].item() for handle in handles]

    assert rank_pool.run(body, ranks=2)[1] == [1, 3, 5, 0, 2, 4]


def test_messages_in_both_directions_at_once_arrive_in_separate_groups(rank_pool):
    def body():
        mesh = Mesh(pp=4)
        everyone = [range(4)]
        forward, backward = mesh.new_group(everyone, "pp"), mesh.new_group(everyone, "pp")
        mine = torch.tensor([float(mesh.rank)])
        to_right, to_left = (mesh.rank + 1) % 4, (mesh.rank - 1) % 4
        handles = [receive(torch.empty(1), forward, to_left), receive(torch.empty(1), backward, to_right)]
        sends = [send(mine, forward, to_right), send(mine + 10, backward, to_left)]
        arrived = [handle.wait().item() for handle in handles]
        for handle in sends:
            handle.wait()
        return arrived, mesh.traffic.snapshot()

    results = rank_pool.run(body, ranks=4)
    assert [arrived for arrived, _ in results] == [[3, 11], [0, 12], [1, 13], [2, 10]]
    assert all(counted == {"pp": {"receive": Count(2, 8), "send": Count(2, 8)}} for _, counted in results)


def test_a_tensor_may_be_dropped_while_it_is_sent(rank_pool):
    def body():
        group = Mesh(pp=2).group("pp")
        if group.index == 0:
            handle = send(torch.full((1_000_000,), 7.0), group, 1)
            junk = [torch.zeros(1_000_000) for _ in range(4)]
            handle.wait()
            return len(junk)
        return set(receive(torch.empty(1_000_000), group, 0).wait().tolist())

    assert rank_pool.run(body, ranks=2)[1] == {7.0}


def test_a_failed_wait_names_the_purpose_of_the_message(rank_pool):
    def body():
        mesh = Mesh(pp=2, timeout=20)
        group = mesh.group("pp")
        if group.index == 0:
            mesh.close()
            del group, mesh
            return None
        handle = receive(torch.empty(4), group, 0, label="1F3")
        return error_of(handle.wait), error_of(handle.wait), error_of(send(torch.ones(4), group, 0).wait)

    first, again, of_send = rank_pool.run(body, ranks=2)[1]
    assert first.startswith("rank 1 waits for 1F3 from rank 0 over pp: connection closed by peer")
    assert again == first
    assert of_send.startswith("rank 1 waits for its message to reach rank 0 over pp: ")


def test_a_wait_for_a_message_ends_after_the_timeout(rank_pool):
    def body():
        group = Mesh(pp=2, timeout=0.3).group("pp")
        if group.index == 0:
            return "silent"
        return error_of(receive(torch.empty(4), group, 0, label="1F3").wait)

    message = rank_pool.run(body, ranks=2)[1]
    assert message.startswith("rank 1 waits for 1F3 from rank 0 over pp: ")


@pytest.mark.parametrize("index", [0, 1, -1])
def test_only_another_rank_of_the_group_is_a_peer(index):
    group = Group("pp", (4,), 0, None, Traffic(), 1.0)
    with pytest.raises(CommunicationError, match=rf"rank 4 cannot send to index {index} of pp"):
        send(torch.ones(1), group, index)
    with pytest.raises(CommunicationError, match=rf"rank 4 cannot receive from index {index} of pp"):
        receive(torch.ones(1), group, index)
    assert group.traffic.snapshot() == {}
