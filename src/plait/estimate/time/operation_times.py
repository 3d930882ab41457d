"""Seconds of an operation on a device: the longer of its arithmetic and its bytes, and a fixed cost."""

from __future__ import annotations

from math import ceil

from plait.estimate.time.hardware import Hardware
from plait.estimate.time.operations import DeviceOperation, Elementwise, FusedAttention, Product

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75), (64, 64, 0.6))
"""Tiles of a result that a multiprocessor computes at a time, and the rate beside that of the largest."""


def operation_seconds(operation: DeviceOperation, hardware: Hardware, precision: str, item: int) -> float:
    """Return the device time of `operation`; `item`: bytes of an element of the operands in memory."""
    part, fixed = hardware.efficiency, hardware.efficiency.kernel
    memory = hardware.memory_bandwidth * part.memory
    if isinstance(operation, Elementwise):
        reached = part.activation if operation.activation else part.elementwise
        return operation.nbytes / (memory * reached) + fixed * operation.kernels
    if isinstance(operation, FusedAttention):
        return attention_flops(operation) / (
            hardware.peak_of(attention_precision(precision))
            * (part.attention_backward if operation.backward else part.attention)
        ) + fixed * (3 if operation.backward else 1)
    rate = hardware.peak_of(precision) * part.product * product_efficiency(operation, hardware)
    operands = (operation.m + operation.n) * operation.k * item
    nbytes = operation.batch * (operands + operation.m * operation.n * operation.result_bytes)
    computing, moving = product_flops(operation) / rate, nbytes / (memory * part.operands)
    return (max(computing, moving) if hardware.overlaps else computing + moving) + fixed


def product_flops(product: Product) -> float:
    """Return the floating-point operations: a multiplication and an addition for each of m · n · k."""
    return 2 * product.batch * product.m * product.n * product.k


def attention_flops(attention: FusedAttention) -> float:
    """Return the floating-point operations: two products forward; five backward, one of them a repetition."""
    pairs = attention.rows * attention.heads * attention.queries * attention.keys * attention.seen
    return 2 * pairs * attention.width * (5 if attention.backward else 2)


def attention_precision(precision: str) -> str:
    """Return the precision of attention: that of the linears, but bf16 where linears compute in fp8."""
    return "bf16" if precision == "fp8" else precision


def product_efficiency(product: Product, hardware: Hardware) -> float:
    """Return the part of the largest rate that a product's shape allows, at most 1.

    Results are computed in tiles, a wave of them at a time, one on each multiprocessor: tiles at the edge and
    the last wave are not full. Products with a short sum spend their time on loading and storing tiles.
    """
    depth = product.k / (product.k + hardware.efficiency.half_depth)
    return depth * _tiles_used(product, hardware.multiprocessors)


def _tiles_used(product: Product, units: int) -> float:
    """Return the part of the product rate that is left by tiles that are not full; 1 on a CPU (`units` 0)."""
    if units == 0:
        return 1.0
    best = 0.0
    for height, width, rate in TILES:
        tiles = ceil(product.m / height) * ceil(product.n / width) * product.batch
        used = product.m * product.n * product.batch / (tiles * height * width)
        waves = ceil(tiles / units)
        best = max(best, rate * used * tiles / (waves * units))
    return best
