"""Rules of ATen operations: in which dim of the result the positions of a sequence are.

A rule applies to a call with positions in at least one argument. It returns the dim of the result whose
index is the position, where each element of the result is computed from elements of its own position only.
Otherwise it returns None: the operation mixes positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from plait.proof.position_dims import OperationCall, PositionDim, tensors_among
from plait.proof.position_rules_of_indexing import (
    indexed,
    indexed_along,
    part_replaced,
    selected,
    written_along,
    written_at,
)

Rule = Callable[[OperationCall], PositionDim | None]
Dims = Callable[[OperationCall, int], Collection[int]]
"""Given a call and the number of an argument's dims, returns some of these."""


def elementwise(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of an element-wise operation's result, or None if arguments disagree."""
    return call.aligned(tensors_among(call.arguments.values()), len(call.result))


def reads(argument: str, along: Dims = lambda call, count: ()) -> Rule:
    """Return a rule: the result has the sequence dim of `argument`, unless that is one of the dims `along`.

    For operations that read `argument` along these dims (none: a look-up). The result has the same dims,
    perhaps one more behind (softmax, unfold).
    """

    def rule(call: OperationCall) -> PositionDim | None:
        at = call.only(argument)
        return at if at is not None and at.dim not in along(call, call.tensor(argument).dim()) else None

    return rule


def named_dims(call: OperationCall, count: int) -> Collection[int]:
    """Return the dims given by the arguments `dim`, `dims` or `dimension`; all dims where none is given."""
    names = ("dim", "dims", "dimension")
    return [dim for name in names for dim in call.dims(name, count)] or range(count)


def cut_dims(call: OperationCall, count: int) -> Collection[int]:
    """Return the dim of which a slice of `self` takes a part; none where it takes all."""
    return () if tuple(call.tensor("self").shape) == call.result else call.dims("dim", count)


def padded_dims(call: OperationCall, count: int) -> Collection[int]:
    """Return the dims that the argument `pad` makes longer; its numbers begin with the last dim."""
    pad = call.arguments["pad"]
    return [count - 1 - back for back in range(count) if any(pad[2 * back : 2 * back + 2])]


def normalized_dims(call: OperationCall, count: int) -> Collection[int]:
    """Return the dims that a layer norm normalises over: as many last ones as `normalized_shape` has."""
    return range(count - len(call.arguments["normalized_shape"]), count)


def batch_dims(call: OperationCall, count: int) -> Collection[int]:
    """Return the dims over which a batch norm averages; in evaluation mode, dim 1, which it scales."""
    return [1] if call.arguments.get("training") is False else range(count)


def reduced(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of the result of a reduction over `dim`, or None if it is reduced."""
    at, count = call.only("self"), call.tensor("self").dim()
    dims = call.dims("dim", count) or range(count)
    other = None if at is None else at.without(dims)
    return at if other is not None and call.arguments.get("keepdim") else other


def viewed(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of the result of a view or reshape, or None if no dim contains it."""
    at, shape = call.only("self"), call.tensor("self").shape
    if call.arguments.get("dtype") is not None:  # view(dtype), which changes the size of the last dim
        return at if at is not None and at.dim < len(shape) - 1 else None
    return None if at is None else at.viewed(shape, call.result, call.length)


def permuted(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim after `permute`, `transpose` or `t`; None where `self` has none."""
    at, count = call.only("self"), call.tensor("self").dim()
    order = list(range(count))
    if call.name == "permute":
        order = call.dims("dims", count)
    elif call.name == "t":
        order.reverse()
    else:
        (one,), (other,) = call.dims("dim0", count), call.dims("dim1", count)
        order[one], order[other] = other, one
    return None if at is None else at.at(order.index(at.dim))


def unsqueezed(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim after `unsqueeze` inserts a dim of size 1; None where `self` has none."""
    at, (dim,) = call.only("self"), call.dims("dim", len(call.result))
    return None if at is None else at.at(at.dim + (dim <= at.dim))


def squeezed(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim after `squeeze` removes dims of size 1; None where `self` has none."""
    at, shape = call.only("self"), call.tensor("self").shape
    dims = call.dims("dim", len(shape)) if "dim" in call.arguments else list(range(len(shape)))
    return None if at is None else at.at(at.dim - sum(shape[dim] == 1 for dim in dims if dim < at.dim))


def expanded(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim after `expand` or `repeat`; None if repeated as many times as positions."""
    at, shape = call.only("self"), call.tensor("self").shape
    if at is None:
        return None
    new = len(call.result) - len(shape)
    old = [1] * new + list(shape)
    times = [size // max(1, before) for size, before in zip(call.result, old, strict=True)]
    if any(count and count % call.length == 0 for count in times):
        return None
    return PositionDim(at.dim + new, at.outer * times[at.dim + new], at.inner)


def diagonal(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of the result of `diagonal`, or None if it is one of the two dims it reads."""
    at, count = call.only("self"), call.tensor("self").dim()
    return None if at is None else at.without([*call.dims("dim1", count), *call.dims("dim2", count)])


def concatenated(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of `cat`'s or `stack`'s result; None if joined along it, or tensors differ."""
    tensors = [tensor for tensor in call.arguments["tensors"] if tensor.shape != (0,)]
    found = {call.positions.get(id(tensor)) for tensor in tensors}
    at, (dim,) = found.pop(), call.dims("dim", len(call.result))
    if found or at is None:
        return None
    if call.name == "stack":
        return at.at(at.dim + (dim <= at.dim))
    return at if at.dim != dim else None


def matrix_product(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of a matrix product's result, or None if the product sums over it."""
    left, right, added = _factors(call)
    at = _product(call, left, right)
    if at is None or added is None:
        return at
    return at if call.repeats(added, at, len(call.result)) else None


def _factors(call: OperationCall) -> tuple[Tensor, Tensor, Tensor | None]:
    for left, right in (("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec")):
        if left in call.arguments:
            return call.tensor(left), call.tensor(right), call.tensor("self")
    right = "vec" if call.name == "mv" else "mat2"
    return call.tensor("self"), call.tensor(right), None


def _product(call: OperationCall, left: Tensor, right: Tensor) -> PositionDim | None:
    one, other = call.positions.get(id(left)), call.positions.get(id(right))
    batch = range(left.dim() - 2)
    if one is not None and other is not None:
        return one if one == other and one.dim in batch else None
    if one is not None:
        return one if one.dim == left.dim() - 2 else None
    return other if other is not None and right.dim() > 1 and other.dim == right.dim() - 1 else None


def convolution(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of a convolution's result, or None if it combines positions."""
    at, arguments = call.only("input"), call.arguments
    if at is None or at.dim == 1:
        return None
    if at.dim == 0:
        return at
    numbers = {name: _entry(arguments[name], at.dim - 2) for name in ("stride", "padding", "output_padding")}
    is_pointwise = call.tensor("weight").shape[at.dim] == 1 and numbers["stride"] == 1
    return at if is_pointwise and not numbers["padding"] and not numbers["output_padding"] else None


def _entry(numbers: list[int], index: int) -> int:
    return numbers[index if len(numbers) > 1 else 0]


def attention(call: OperationCall) -> PositionDim | None:
    """Return the sequence dim of attention's result, or None if attention combines its positions."""
    at, mask = call.of("query"), call.of("attn_bias") or call.of("attn_mask")
    same = at == call.of("key") == call.of("value") and mask is None
    return at if at is not None and same and at.dim < 2 else None


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            *("abs", "alias", "bernoulli", "clone", "complex", "copy", "copysign", "detach", "empty_like"),
            *("eq", "exponential", "fill", "floor_divide", "full_like", "gcd", "ge", "gelu", "geometric"),
            *("gt", "hardswish", "heaviside", "lcm", "le", "lift_fresh", "log_sigmoid_forward", "lt"),
            *("masked_fill", "mish", "native_dropout", "ne", "normal", "ones_like", "polar", "rand_like"),
            *("randint_like", "randn_like", "random", "rsub", "threshold", "true_divide", "uniform"),
            *("where", "xlogy", "zero", "zeros_like", "_conj", "_neg_view", "_prelu_kernel", "_to_copy"),
        ),
        elementwise,
    ),
    **dict.fromkeys(
        (
            *("cummax", "cummin", "cumprod", "cumsum", "flip", "glu", "logcumsumexp", "roll", "sort"),
            *("split", "split_with_sizes", "topk", "unfold", "unsafe_split", "unsafe_split_with_sizes"),
            *("_fft_c2c", "_fft_c2r", "_fft_r2c", "_log_softmax", "_safe_softmax", "_softmax"),
        ),
        reads("self", named_dims),
    ),
    **dict.fromkeys(
        (
            *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "kthvalue"),
            *("linalg_vector_norm", "logsumexp", "max", "mean", "median", "min", "mode", "nanmedian"),
            *("nansum", "norm", "prod", "select", "std", "std_mean", "sum", "unbind", "var", "var_mean"),
        ),
        reduced,
    ),
    **dict.fromkeys(("view", "_reshape_alias", "_unsafe_view"), viewed),
    **dict.fromkeys(("bucketize", "view_as_complex", "view_as_real"), reads("self")),
    **dict.fromkeys(("permute", "t", "transpose"), permuted),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    **dict.fromkeys(("expand", "repeat"), expanded),
    "slice": reads("self", cut_dims),
    "diagonal": diagonal,
    **dict.fromkeys(("cat", "stack"), concatenated),
    "constant_pad_nd": reads("self", padded_dims),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "bmm", "mm", "mv"), matrix_product),
    "convolution": convolution,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), reads("input", normalized_dims)),
    "native_group_norm": reads("input", lambda call, count: range(1, count)),
    **dict.fromkeys(
        ("cudnn_batch_norm", "native_batch_norm", "_native_batch_norm_legit"), reads("input", batch_dims)
    ),
    **dict.fromkeys(("tril", "triu"), reads("self", lambda call, count: (count - 2, count - 1))),
    "multinomial": reads("self", lambda call, count: (count - 1,)),
    **dict.fromkeys(
        (
            *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        attention,
    ),
    "embedding": reads("indices"),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), indexed_along),
    "index_select": selected,
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce"), written_along),
    **dict.fromkeys(("select_scatter", "slice_scatter"), part_replaced),
    "take": reads("index"),
    **dict.fromkeys(("index", "_unsafe_index"), indexed),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), written_at),
    **dict.fromkeys(
        (
            *("addbmm", "batch_norm_stats", "dot", "masked_scatter", "masked_select"),
            *("nonzero", "put", "reflection_pad1d", "replication_pad1d", "vdot"),
            "_batch_norm_with_update",
        ),
        lambda call: None,
    ),
}
"""By name of the operation, without the underscore of a variant that works in place."""
UNIFORM = frozenset(
    {
        *("empty", "empty_permuted", "empty_strided", "full", "new_empty", "new_empty_strided", "new_full"),
        *("new_ones", "new_zeros", "ones", "rand", "randint", "randn", "zeros", "_efficientzerotensor"),
    }
)
"""Operations whose result is given by its shape, and has the same value, or a random one, everywhere."""
REPEATED = frozenset({"expand", "repeat"})
"""Operations whose result is uniform along the dims that they make larger."""
SHAPE_IN_PLACE = frozenset({"squeeze_", "t_", "transpose_", "unsqueeze_"})
"""Operations that change the shape of their argument: unknown, since a rule needs the shape before."""


def rule_of(name: str, *, is_pointwise: bool) -> Rule | None:
    """Return the rule of an ATen operation; None where the operation is unknown.

    `name` is without the underscore of a variant in place; `is_pointwise`: whether torch tags it so.
    """
    return RULES.get(name) or (elementwise if is_pointwise else None)
