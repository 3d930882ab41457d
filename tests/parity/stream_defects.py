"""Mistakes that only a GPU would show: missing waits, memory that is used too early, streams that block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from plait.checkpoint import save_task, saving
from plait.engine import runner
from plait.engine.pipeline import stage_exchange
from plait.engine.pipeline.stage_exchange import Exchange
from plait.engine.sharding import gatherer, gradient_norm, reducer
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.reducer import Reducer
from plait.ranks.handle import Handle
from plait.ranks.mesh import Mesh
from plait.ranks.transport.process_ranks import current_ranks
from plait.schedules.action import Kind
from plait.tensor.autograd import paired_collectives
from plait.tensor.autograd import regathered_activations as uneven_collectives
from plait.tensor.experts import token_exchange

Defect = Callable[[], AbstractContextManager[object]]


def rank() -> int:
    ranks = current_ranks()
    assert ranks is not None
    return ranks.rank


def _started_only(module: Any, name: str) -> Any:
    """`module`'s collective is started, and its wait returns at once."""
    original = getattr(module, name)

    def start(*arguments: Any, **options: Any) -> Handle[Tensor]:
        handle: Handle[Tensor] = original(*arguments, **options)
        finish = handle._finish
        assert finish is not None
        handle.wait = lambda: finish()  # type: ignore[method-assign]
        return handle

    return patch.object(module, name, start)


def parameters_not_awaited() -> Any:
    return patch.object(Gatherer, "wait", lambda self, name: None)


def parameters_released_while_gathered() -> Any:
    original = Gatherer.gather

    def gather(self: Gatherer, name: str) -> None:
        original(self, name)
        for _, buffer in self._pending.get(name, ()):
            buffer.release_parameters()

    return patch.object(Gatherer, "gather", gather)


def shard_updated_while_gathered() -> Any:
    original = gatherer._gather

    def gather(buffer: Any) -> Any:
        handle = original(buffer)
        buffer.shard.add_(1)  # which is read where it lies
        return handle

    return patch.object(gatherer, "_gather", gather)


def gathered_in_another_order_on_one_rank() -> Any:
    """Rank 1 gathers the next unit's parameters first."""
    original = Gatherer.gather

    def gather(self: Gatherer, name: str) -> None:
        names = list(self.units)
        if rank() == 1 and name == names[0]:
            original(self, names[1])
        original(self, name)

    return patch.object(Gatherer, "gather", gather)


def not_reduced_on_one_rank() -> Any:
    original = Reducer.reduce

    def reduce(self: Reducer, name: str) -> None:
        if rank() == 0 or name != next(iter(self.units)):
            original(self, name)

    return patch.object(Reducer, "reduce", reduce)


def reductions_not_awaited() -> Any:
    return _started_only(reducer, "all_reduce")


def scatters_not_awaited() -> Any:
    return _started_only(reducer, "reduce_scatter")


def gradient_freed_while_scattered() -> Any:
    original = Reducer.scatter

    def scatter(self: Reducer, name: str) -> None:
        original(self, name)
        for buffer, _ in self._scattered[name]:
            buffer.release_gradients()

    return patch.object(Reducer, "scatter", scatter)


def gradient_cleared_while_scattered() -> Any:
    original = Reducer.scatter

    def scatter(self: Reducer, name: str) -> None:
        original(self, name)
        for buffer, _ in self._scattered[name]:
            for gradient in buffer.whole_gradients:
                gradient.zero_()

    return patch.object(Reducer, "scatter", scatter)


def input_not_awaited() -> Any:
    def take(self: Exchange, action: Any) -> list[Tensor]:
        buffers, _ = self._posted.pop(action)
        self._lent[action.stage, action.microbatch].extend(buffers)
        return buffers

    return patch.object(Exchange, "take", take)


def buffers_returned_too_early() -> Any:
    """When the input has come, and before the stage has read it for the last time."""
    original = Exchange.take

    def take(self: Exchange, action: Any) -> list[Tensor]:
        buffers = original(self, action)
        self.release(action.stage, action.microbatch)
        return buffers

    return patch.object(Exchange, "take", take)


def sends_not_awaited() -> Any:
    return patch.object(Exchange, "finish", lambda self: None)


def output_overwritten_while_sent() -> Any:
    original = Exchange.send

    def send(self: Exchange, action: Any, tensors: Any, peer: int) -> None:
        original(self, action, tensors, peer)
        for tensor in tensors:
            tensor.zero_()

    return patch.object(Exchange, "send", send)


def received_on_the_wrong_channel() -> Any:
    """Rank 1 expects gradients on the channel of activations."""
    original = Exchange.post

    def post(self: Exchange, action: Any, peer: int) -> None:
        wrong = rank() == 1 and action.kind is Kind.I
        channels = self._channels
        if wrong:
            self._channels = {**channels, (peer, 1, Kind.I): channels[peer, 1, Kind.F]}
        original(self, action, peer)
        self._channels = channels

    return patch.object(Exchange, "post", post)


@contextmanager
def a_communicator_for_all_channels_of_a_pair() -> Iterator[None]:
    original = Mesh.channel_groups

    def channel_groups(self: Mesh, channels: Any) -> Any:
        groups = original(self, channels)
        return {(a, b, kind): groups[min(a, b), max(a, b), Kind.F] for a, b, kind in groups}

    with patch.object(Mesh, "channel_groups", channel_groups), _ends_by_rank():
        yield


@contextmanager
def _ends_by_rank() -> Iterator[None]:
    """Messages name their ends by rank, where a group carries both directions."""

    send, receive = stage_exchange.send, stage_exchange.receive

    def sent(tensor: Tensor, group: Any, index: int, **options: Any) -> Any:
        return send(tensor, group, 1 - group.index, **options)

    def received(buffer: Tensor, group: Any, index: int, **options: Any) -> Any:
        return receive(buffer, group, 1 - group.index, **options)

    with patch.multiple(stage_exchange, send=sent, receive=received):
        yield


def input_gradient_not_awaited() -> Any:
    """Of a region of tensor parallelism."""
    return _started_only(paired_collectives, "all_reduce")


def parts_of_the_sequence_not_awaited() -> Any:
    return _started_only(uneven_collectives, "all_gather")


def norm_not_awaited() -> Any:
    return _started_only(gradient_norm, "all_reduce")


def mean_loss_not_awaited() -> Any:
    return _started_only(runner, "all_reduce")


# ── that only the order of accesses shows, since operations of the CPU are done when they return ──


def staging_not_awaited() -> Any:
    """The event is on a stream without the copies, as on another device's."""

    class Elsewhere:
        def __init__(self, device: Any) -> None:
            pass

        def wait(self) -> None:
            pass

    return patch.object(saving, "StreamEvent", Elsewhere)


def staging_reused_while_written() -> Any:
    """The next checkpoint is copied to memory that the last one is still written from."""
    return patch.object(save_task, "join_thread", lambda thread: None)


def offloaded_gradient_read_before_it_arrives() -> Any:
    original = reducer.read_later

    def read_later(summed: Tensor) -> Any:
        read = original(summed)
        (copy,) = (cell.cell_contents for cell in read.__closure__ if isinstance(cell.cell_contents, Tensor))
        return lambda: copy

    return patch.object(reducer, "read_later", read_later)


def offloaded_shard_updated_while_copied() -> Any:
    """The optimizer steps on the CPU while the GPU still copies the parameters."""
    return patch.object(gatherer, "synchronize_stream", lambda device: None)


def tokens_not_awaited() -> Any:
    """Tokens are read while they still travel to the ranks of their experts."""
    return _started_only(token_exchange, "all_to_all_uneven")


def counts_of_tokens_not_awaited() -> Any:
    return _started_only(token_exchange, "all_gather")


@contextmanager
def tokens_overwritten_while_sent() -> Iterator[None]:
    """What travels is cleared as soon as it is sent."""
    original = token_exchange.all_to_all_uneven

    def start(flat: Tensor, *arguments: Any, **options: Any) -> Handle[Tensor]:
        handle: Handle[Tensor] = original(flat, *arguments, **options)
        flat.zero_()
        return handle

    with patch.object(token_exchange, "all_to_all_uneven", start):
        yield


UNWAITED = "ended and has not waited for "
FULL, EACH = {"dp": 2, "strategy": "full"}, {"dp": 2, "strategy": "full", "reduce": "each"}
PAIR, V = {"pp": 2}, {"pp": 2, "schedule": "zb-v"}
EXPERTS = {"dp": 2, "ep": 2}
STREAM_DEFECTS: dict[Defect, tuple[dict[str, Any], str]] = {
    parameters_not_awaited: (FULL, UNWAITED + "all_gather"),
    parameters_released_while_gathered: (FULL, "freed the (in|out)put of all_gather"),
    shard_updated_while_gathered: (FULL, "wrote to the input of all_gather"),
    gathered_in_another_order_on_one_rank: (FULL, "different calls: all_gather .* and all_gather"),
    not_reduced_on_one_rank: ({"dp": 2}, "deadlock on streams|ended before it took part|different calls"),
    reductions_not_awaited: ({"dp": 2}, UNWAITED + "all_reduce"),
    scatters_not_awaited: (EACH, UNWAITED + "reduce_scatter"),
    gradient_freed_while_scattered: (EACH, "freed the (in|out)put of reduce_scatter"),
    gradient_cleared_while_scattered: (EACH, "wrote to the input of reduce_scatter"),
    input_not_awaited: (PAIR, UNWAITED + "0I0 from rank 1 to rank 0"),
    buffers_returned_too_early: (PAIR, "rank 0 holds another gradient"),
    sends_not_awaited: (PAIR, UNWAITED + r"0F\d from rank 0|" + UNWAITED + r"1F\d from rank 0"),
    output_overwritten_while_sent: (PAIR, "wrote to the input of 0F0 from rank 0"),
    received_on_the_wrong_channel: (V, "deadlock on streams: "),
    a_communicator_for_all_channels_of_a_pair: (V, "rank 0 has 0F0 from rank 0 to rank 1 .* behind "),
    input_gradient_not_awaited: ({"tp": 2}, UNWAITED + "all_reduce .*tp"),
    parts_of_the_sequence_not_awaited: (
        {"tp": 2, "sequence_parallel": "keep"},
        UNWAITED + "all_gather .*tp",
    ),
    norm_not_awaited: (FULL, UNWAITED + "all_reduce"),
    mean_loss_not_awaited: (PAIR, UNWAITED + "all_reduce .*world"),
    tokens_not_awaited: (EXPERTS, UNWAITED + "all_to_all"),
    counts_of_tokens_not_awaited: (EXPERTS, "negative dimension|" + UNWAITED + "all_gather"),
    tokens_overwritten_while_sent: (EXPERTS, "wrote to the input of all_to_all"),
}
"""By mistake: a plan that meets it, and what is told."""
OFFLOAD = {"dp": 2, "strategy": "full", "offload": "full", "reduce": "each"}
RACES: dict[Defect, tuple[dict[str, Any], str]] = {
    parameters_not_awaited: (FULL, r"\(reads\) .* after all_gather"),
    parameters_released_while_gathered: (FULL, "freeing .* after all_gather"),
    shard_updated_while_gathered: (FULL, "add_ .* after all_gather"),
    reductions_not_awaited: ({"dp": 2}, "after all_reduce"),
    scatters_not_awaited: (EACH, "in engine/sharding/reducer.py collect .* after reduce_scatter"),
    gradient_freed_while_scattered: (EACH, "freeing .* after reduce_scatter"),
    gradient_cleared_while_scattered: (EACH, "zero_ .* after reduce_scatter"),
    input_not_awaited: (PAIR, r"\(reads\) .* after 0I0 from rank 1"),
    buffers_returned_too_early: (PAIR, r"run_backward\w* .* after 0I1 from rank 1"),
    output_overwritten_while_sent: (PAIR, "zero_ .* after 0F0 from rank 0 to rank 1"),
    input_gradient_not_awaited: ({"tp": 2}, "after all_reduce .*tp"),
    parts_of_the_sequence_not_awaited: ({"tp": 2, "sequence_parallel": "keep"}, "after all_gather .*tp"),
    norm_not_awaited: (FULL, "after all_reduce"),
    mean_loss_not_awaited: (PAIR, "after all_reduce .*world"),
    tokens_not_awaited: (EXPERTS, "after all_to_all"),
    counts_of_tokens_not_awaited: (EXPERTS, "after all_gather"),
    tokens_overwritten_while_sent: (EXPERTS, "zero_ .* after all_to_all"),
    staging_not_awaited: ({"dp": 2}, "the writer of a checkpoint .* after copy_"),
    staging_reused_while_written: ({"dp": 2}, "copy_ .* after the writer of a checkpoint"),
    offloaded_gradient_read_before_it_arrives: (OFFLOAD, "add_ in engine/sharding/reducer.py .* after copy_"),
    offloaded_shard_updated_while_copied: (
        OFFLOAD,
        "add_ in user .* after all_gather",  # which reads it: host and device are one in this test
    ),
}
"""The order of accesses finds these: by mistake a plan, and the race that is told."""
QUICK = (
    parameters_not_awaited,
    shard_updated_while_gathered,
    input_not_awaited,
    received_on_the_wrong_channel,
)
QUICK += (gathered_in_another_order_on_one_rank, gradient_freed_while_scattered, buffers_returned_too_early)
"""One of each kind, for `make test`."""
