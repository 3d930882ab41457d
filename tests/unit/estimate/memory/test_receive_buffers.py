from __future__ import annotations

import torch

from plait.estimate.memory.activations import ReceiveBufferAccount
from plait.estimate.memory.memory_ledger import Category, MemoryBlock, MemoryLedger
from plait.models.layers.shape_inference import TensorInfo
from plait.schedules.action import Action
from plait.schedules.lowering.program import Finish

HIDDEN = TensorInfo((2, 8), torch.float32, requires_grad=True)
MASK = TensorInfo((2,), torch.bool, requires_grad=False)
BYTES = 64


def account() -> tuple[MemoryLedger, ReceiveBufferAccount]:
    """Of the second of three stages."""
    ledger = MemoryLedger()
    return ledger, ReceiveBufferAccount(ledger, [[[HIDDEN, MASK]], [[HIDDEN]]])


def total(ledger: MemoryLedger) -> int:
    return ledger.snapshot(Finish()).total


def test_receive_buffers_are_reused_after_their_release() -> None:
    ledger, messages = account()
    first, second = Action.parse("1F0"), Action.parse("1F1")
    messages.post(first)
    assert total(ledger) == BYTES + 2
    blocks = messages.take(first)
    assert [block.nbytes for block in blocks] == [BYTES, 2]
    messages.post(second)
    assert total(ledger) == 2 * (BYTES + 2)
    messages.release(1, 0)
    messages.post(Action.parse("1F2"))
    assert total(ledger) == 2 * (BYTES + 2)


def test_only_differentiable_tensors_have_gradients_sent_back() -> None:
    ledger, messages = account()
    messages.post(Action.parse("0I0"))
    assert [block.nbytes for block in messages.take(Action.parse("0I0"))] == [BYTES]
    assert total(ledger) == BYTES


def test_a_channel_holds_two_sends() -> None:
    ledger, messages = account()
    for number in range(4):
        messages.send(Action.parse(f"1F{number}"), [MemoryBlock(100, Category.ACTIVATIONS)], 2)
        assert total(ledger) == 100 * min(number + 1, 2)
    messages.send(Action.parse("1I0"), [MemoryBlock(10, Category.ACTIVATIONS)], 0)
    assert total(ledger) == 210
    messages.finish()
    assert total(ledger) == 0


def test_a_received_tensor_that_is_sent_on_counts_twice() -> None:
    ledger, messages = account()
    messages.post(Action.parse("1F0"))
    blocks = messages.take(Action.parse("1F0"))
    before = total(ledger)
    messages.send(Action.parse("1F0"), blocks, 2)
    assert total(ledger) == 2 * before


def test_a_missing_gradient_is_counted_as_sent_zeros() -> None:
    ledger, messages = account()
    messages.send_gradients(Action.parse("1I0"), [None, None], 0)
    assert total(ledger) == BYTES
