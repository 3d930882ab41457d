"""Fused kernels of recorded operations, and of functions of torch on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from plait.estimate.memory.operation_recorder import OperationRecorder
from plait.estimate.time.decoder_operations import LayerWork
from plait.estimate.time.kernel_fusion import Range, RecordedOperation, fused
from plait.estimate.time.operation_times import Elementwise, Product

ROWS, WIDTH = 6, 10
SIZE = 4 * ROWS * WIDTH
PRODUCT = Product(3, 4, 5)


def reads(*storages: int) -> dict[Range, int]:
    """Return bytes of each storage that are a power of ten, so that a sum tells which were read."""
    return {(storage, 0, 1): 10**storage for storage in storages}


def writes(*storages: int) -> dict[int, int]:
    return {storage: 10**storage for storage in storages}


def elementwise(
    given: dict[Range, int], made: dict[int, int], *, activation: bool = False
) -> RecordedOperation:
    return RecordedOperation(Elementwise(7.0, activation=activation), given, made)


def product(given: dict[Range, int], made: dict[int, int]) -> RecordedOperation:
    return RecordedOperation(PRODUCT, given, made)


def test_a_kernel_reads_once_what_it_does_not_make_and_writes_what_others_need() -> None:
    """Storage 1 is read by the next operation of the kernel only, and 2 by the product."""
    found = fused(
        {
            "forward": [
                elementwise(reads(0), writes(1)),
                elementwise(reads(0, 1), writes(2), activation=True),
                product(reads(2), writes(3)),
                elementwise(reads(3), writes(4)),
            ]
        }
    )
    first, last = Elementwise(1 + 100, activation=True), Elementwise(1_000 + 10_000)
    assert found == {"forward": (first, PRODUCT, last)}


def test_what_a_later_kernel_of_the_phase_reads_is_written() -> None:
    found = fused(
        {
            "forward": [
                elementwise(reads(0), writes(1)),
                product(reads(0), writes(2)),
                elementwise(reads(1, 2), writes(3)),
            ]
        }
    )
    assert found == {"forward": (Elementwise(1 + 10), PRODUCT, Elementwise(10 + 100 + 1_000))}


def test_what_a_collective_reads_is_written_and_it_ends_the_kernel() -> None:
    found = fused(
        {
            "forward": [
                elementwise(reads(0), writes(1)),
                RecordedOperation(None, reads(1), {}),
                elementwise(reads(0), writes(2)),
            ]
        }
    )
    assert found == {"forward": (Elementwise(1 + 10), Elementwise(1 + 100))}


def test_what_only_kernels_of_the_backward_read_is_computed_again_from_what_the_forward_read() -> None:
    """Storage 1; a product of the weights' gradient reads 2, which is written."""
    found = fused(
        {
            "forward": [elementwise(reads(0), writes(1, 2)), product(reads(0), writes(3))],
            "backward": [elementwise(reads(1, 3), writes(4))],
            "weights": [product(reads(2), writes(5))],
        }
    )
    assert found["forward"] == (Elementwise(1 + 100), PRODUCT)
    assert found["backward"] == (Elementwise(1 + 1_000 + 10_000),)


def test_an_operation_in_place_reads_and_writes_also_where_nobody_reads_it_later() -> None:
    assert fused({"forward": [elementwise(reads(0, 1), writes(0))]}) == {
        "forward": (Elementwise(1 + 10 + 1),)
    }


def work_of(function: Callable[[Tensor], Tensor]) -> LayerWork:
    """The work of a function of `[ROWS, WIDTH]`, and of its backward."""
    recorder = OperationRecorder(fuses=True)
    with torch.device("meta"):
        given = torch.empty(ROWS, WIDTH, requires_grad=True)
        with recorder.recording("forward"):
            output = function(given)
        with recorder.recording("backward"):
            torch.autograd.backward([output], [torch.empty_like(output)])
    return recorder.take()


def test_a_norm_of_several_operations_is_a_kernel_that_reads_its_input_and_writes_its_output() -> None:
    """Its backward reads the input again, and the output's gradient."""
    work = work_of(lambda x: functional.rms_norm(x, (WIDTH,)))
    assert work.forward == (Elementwise(2 * SIZE),)
    assert work.backward == (Elementwise(3 * SIZE),)


def test_a_gated_activation_is_a_kernel_between_products() -> None:
    weights = [torch.empty(WIDTH, WIDTH, device="meta") for _ in range(3)]

    def gated(x: Tensor) -> Tensor:
        gate, up = x @ weights[0], x @ weights[1]
        return (functional.silu(gate) * up) @ weights[2]

    work, product = work_of(gated), Product(ROWS, WIDTH, WIDTH, result_bytes=4)
    assert work.forward == (product, product, Elementwise(3 * SIZE, activation=True), product)
    assert work.backward[:2] == (product, Elementwise(5 * SIZE, activation=True))
