"""The cost of an ATen operation, from its arguments: a matrix product, fused attention, or bytes moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from plait.estimate.time.operation_times import DeviceOperation, Elementwise, FusedAttention, Product
from plait.tensor.nested_values import tensors_of

FLOAT8_PRODUCTS = frozenset({"_scaled_mm_v2", "scaled_product", "batched_float8_product"})
"""That of `torch.nn.functional.scaled_mm`, and plait's operators for it in graphs, and of experts."""
FACTORS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "_scaled_mm_v2": (0, 1),
    "scaled_product": (0, 2),
    "batched_float8_product": (0, 1),
}
"""The operations that are a matrix product, and which arguments are its factors."""
BATCHES = frozenset({"bmm", "baddbmm_", "batched_float8_product"})
"""Batches of products: where they write to given memory, those of experts (`grouped_products`)."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""The fused attention of the meta device: see `fused_kernels`."""
ACTIVATIONS = frozenset({"elu", "gelu", "mish", "sigmoid", "silu", "softplus", "tanh"})
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
"""Those read as many elements of their first argument as there are indices."""
WRITES_INTO_ROWS = frozenset({"index_add_", "index_put_", "scatter_", "scatter_add_"})
"""Those read and write as many elements of their first argument as their last one has."""
OVERWRITES = frozenset({"bernoulli_", "copy_", "fill_", "normal_", "uniform_"})
"""Those do not read what they write."""
COMPUTES_NOTHING = frozenset({"as_strided_", "detach_", "resize_", "set_", "t_", "transpose_", "zero_"})
"""Views in place; and `zero_`, which stands for a sum over ranks on the meta device."""


class Access(NamedTuple):
    """A tensor that an operation reads or writes, and how many bytes of it."""

    tensor: Tensor
    nbytes: int


class Accesses(NamedTuple):
    """The tensor elements that an operation reads, and those that it writes."""

    reads: Sequence[Access] = ()
    writes: Sequence[Access] = ()


def accesses_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Accesses:
    """Return the bytes that an ATen operation reads and writes of each tensor; none for views, allocations.

    `name`: without its overload, such as "addmm_". `result`: what it has returned.
    """
    if "empty" in name or name in COMPUTES_NOTHING:
        return Accesses()
    given = [*tensors_of(args), *tensors_of([value for key, value in kwargs.items() if key != "out"])]
    made = list(tensors_of(result))
    if name.endswith("_"):  # in place; of a list nothing is returned
        made = made or list(tensors_of(args[0]))
    else:
        memory = {id(one.untyped_storage()) for one in given}
        made = [one for one in made if id(one.untyped_storage()) not in memory]
    if not made:
        return Accesses()
    reads, writes = [_whole(one) for one in given], [_whole(one) for one in made]
    if name in LOOKUPS:
        reads[0] = Access(given[0], writes[0].nbytes)
    elif name in WRITES_INTO_ROWS:
        reads[0] = writes[0] = Access(given[0], reads[-1].nbytes)
    elif name in OVERWRITES:
        del reads[0]
    elif name.startswith("new_") or name.endswith("_like"):  # only the shape is read
        reads = []
    elif name == "nll_loss_backward":  # likewise of its second argument
        del reads[1]
    return Accesses(reads, writes)


def _whole(tensor: Tensor) -> Access:
    """Return the access to all elements; of a tensor that repeats its elements, to those in memory."""
    return Access(tensor, min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def operations_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, accesses: Accesses
) -> tuple[DeviceOperation, ...]:
    """Return an ATen operation's work, for time estimates: matrix products, attention, or bytes moved."""
    if name in FACTORS:
        found = _product(*FACTORS[name], args, kwargs, result)
        grouped = name in BATCHES and (name.endswith("_") or "out" in kwargs)
        return (replace(found, grouped=grouped, in_float8=name in FLOAT8_PRODUCTS),)
    if name == ATTENTION:
        return (_attention(args[0], args[1], causal=len(args) > 4 and args[4]),)
    if name == f"{ATTENTION}_backward":
        return (_attention(args[1], args[2], causal=args[7], backward=True),)
    if name == "convolution":
        return (_convolution(args[0], args[1], result, transposed=args[6], groups=args[8]),)
    if name == "convolution_backward":
        return _convolution_backward(args)
    activation = name.removesuffix("_").removesuffix("_backward") in ACTIVATIONS
    nbytes = sum(one.nbytes for each in accesses for one in each)
    return (Elementwise(nbytes, activation=activation),)


def _product(
    first: int, second: int, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
) -> Product:
    """Return a matrix product; `first`, `second`: which arguments are its factors."""
    *batch, m, k = args[first].shape
    summand_is_read = first > 0 and args[0].numel() == result.numel() and kwargs.get("beta", 1) != 0
    passes = 2 if summand_is_read else 1
    return Product(m, args[second].shape[-1], k, prod(batch), result_bytes=passes * result.itemsize)


def _attention(query: Tensor, key: Tensor, *, causal: bool, backward: bool = False) -> FusedAttention:
    """Return attention of a query `[rows, heads, n, width]` to keys `[rows, key heads, m, width]`."""
    rows, heads, n, width = query.shape
    m, seen = key.shape[2], 1.0
    if causal:  # query i sees the keys 0 to i; half of a square
        seen = n / (2 * m) if n <= m else 1 - m / (2 * n)
    return FusedAttention(rows, heads, key.shape[1], width, n, m, seen, backward)


def _convolution(given: Tensor, weight: Tensor, result: Tensor, *, transposed: bool, groups: int) -> Product:
    """Return a convolution as a product for each group: positions by features, over the window's inputs."""
    around = given if transposed else result
    positions = around.numel() // around.shape[1]
    features, window = weight.shape[0] // groups, weight[0].numel()
    n, k = (window, features) if transposed else (features, window)
    return Product(positions, n, k, groups, result_bytes=result.itemsize)


def _convolution_backward(args: Sequence[Any]) -> tuple[DeviceOperation, ...]:
    """Return the products of those gradients of a convolution that are wanted, and the sum for its bias."""
    gradient, given, weight = args[:3]
    of_input, of_weight, of_bias = args[10]
    forward = _convolution(given, weight, gradient, transposed=args[7], groups=args[9])
    m, n, k, groups, item = forward.m, forward.n, forward.k, forward.batch, gradient.itemsize
    operations = (
        (of_input, Product(m, k, n, groups, item)),
        (of_weight, Product(n, k, m, groups, item)),
        (of_bias, Elementwise(gradient.nbytes)),
    )
    return tuple(operation for wanted, operation in operations if wanted)
