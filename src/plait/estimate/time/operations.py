"""Operations of a layer: matrix products, attention, element-wise work and collectives, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Axis = Literal["tp", "cp", "shard", "replicate", "pp"]
Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring", "message"]


@dataclass(frozen=True)
class Product:
    """`batch` matrix products of `[m, k]` and `[k, n]`."""

    m: float
    n: float
    k: float
    batch: float = 1
    result_bytes: float = 2
    """Bytes read and written for an element of the result: more where it is added to a gradient."""


@dataclass(frozen=True)
class FusedAttention:
    """Softmax attention in one kernel: `rows` sequences, `heads` query heads on this rank."""

    rows: float
    heads: float
    key_heads: float
    width: int
    queries: float
    keys: float
    seen: float
    """Fraction of the pairs of query and key that are computed."""
    backward: bool = False


@dataclass(frozen=True)
class Elementwise:
    """Work whose time is that of reading and writing `nbytes`."""

    nbytes: float
    kernels: float = 1
    activation: bool = False
    """Whether it is the activation inside an MLP, which computes more for each byte."""


@dataclass(frozen=True)
class AxisTransfer:
    """A collective over an axis, and its size.

    `nbytes`: of an all-gather its result, of an all-to-all the inputs of all ranks, else a rank's input.
    """

    collective: Collective
    axis: Axis
    nbytes: float


DeviceOperation: TypeAlias = Product | FusedAttention | Elementwise
