"""`RememberedResults`: runs operations on the meta device; those that ran before give remembered results.

On meta torch computes the shapes of many results in Python, which takes up to a millisecond. A search of
plans runs equal operations on equal shapes ten times in the mean: those of layers under several plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.tensor.autograd.private_torch_functions import hidden_from_function_modes

META = torch.device("meta")
MOST = 2**14
"""Operations of which results are remembered; a search of plans of an 8 B model has 4,600."""

Observer: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]
"""Takes an ATen operation, its arguments and its result."""


class RememberedResults(TorchDispatchMode):
    """Context in which equal operations on the meta device run once, and give results like the first's."""

    supports_higher_order_operators = True

    def __init__(self, *observers: Observer) -> None:
        """Start without any results; `observers`: functions that are called after each operation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observers

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Return the result of `func`, an ATen operation."""
        kwargs = kwargs or {}
        with hidden_from_function_modes():  # a `StorageTracker` has seen the call from outside
            outcome = _outcome_of(func, args, kwargs)
            result = func(*args, **kwargs) if outcome is None else outcome.result(args, kwargs)
            if _writes_to_a_list(func):  # which torch does not count below a mode
                torch.autograd.graph.increment_version(args[0])
            for observe in self._observers:
                observe(func, args, kwargs, result)
        return result


class _TensorKind(NamedTuple):
    """What the results of an operation depend on of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return a new tensor of the kind."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Outcome(NamedTuple):
    """The results of an operation."""

    results: tuple[_TensorKind | int | str | None, ...]
    """A new tensor's kind, or the position or name of an argument, which was written to."""
    container: type | None
    """Of several results: tuple or list."""

    def result(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the results for other arguments of the same kinds."""
        found: list[Any] = []
        for one in self.results:
            if isinstance(one, _TensorKind):
                found.append(one.empty())
            elif isinstance(one, str):
                found.append(kwargs[one])
            else:
                found.append(None if one is None else args[one])
        return found[0] if self.container is None else self.container(found)


def _outcome_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Outcome | None:
    """Return what is known of the results of an operation with these arguments; None where it must run.

    So for views, for what gives a tensor other memory, for higher-order operators, and for tensors that are
    not on meta.
    """
    is_higher_order = not hasattr(func, "overloadpacket")
    if is_higher_order or func.is_view or torch.Tag.inplace_view in func.tags:
        return None
    try:
        given, named = [*map(_key, args)], [(name, _key(one)) for name, one in kwargs.items()]
    except _UnknownKindError:
        return None
    on_meta = kwargs.get("device") == META or any(map(_has_tensors, (*given, *(key for _, key in named))))
    return _remembered(func, tuple(given), tuple(named), torch.get_default_dtype()) if on_meta else None


@lru_cache(MOST)
def _remembered(
    func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], default: torch.dtype
) -> _Outcome | None:
    """Run an operation on new tensors, and return its results; None where they are not to be had again.

    Such as parts of the arguments' memory. `default`: torch's default dtype, which some results have.
    """
    given: dict[int | str, Any] = {number: _argument(key) for number, key in enumerate(args)}
    given |= {name: _argument(key) for name, key in kwargs}
    result = func(
        *[given[number] for number in range(len(args))], **{name: given[name] for name, _ in kwargs}
    )
    if [*map(_key, given.values())] != [*args, *(key for _, key in kwargs)]:
        return None  # it changes the shape of an argument
    several = isinstance(result, (tuple, list))
    places = {id(one): place for place, one in given.items() if isinstance(one, Tensor)}
    memory = [one.untyped_storage() for one in _tensors(given.values())]
    found: list[_TensorKind | int | str | None] = []
    for one in result if several else (result,):
        if one is None or id(one) in places:
            found.append(None if one is None else places[id(one)])
            continue
        if type(one) is not Tensor or not one.is_meta:
            return None
        storage, kind = one.untyped_storage(), _TensorKind(one.shape, one.stride(), one.dtype)
        is_new = all(storage is not other for other in memory)
        if not is_new or storage.nbytes() != kind.empty().untyped_storage().nbytes():
            return None
        memory.append(storage)
        found.append(kind)
    return _Outcome(tuple(found), type(result) if several else None)


class _UnknownKindError(Exception):
    """The results for an argument cannot be known from its kind, such as a tensor that is not on meta."""


def _key(argument: Any) -> Any:
    """Return what results depend on of an argument, hashable: equal keys give equal results."""
    if isinstance(argument, Tensor):
        if type(argument) not in (Tensor, nn.Parameter) or not argument.is_meta:
            raise _UnknownKindError
        return _TensorKind(argument.shape, argument.stride(), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return (list, *map(_key, argument))
    return type(argument), argument  # 1, 1.0 and True are equal, but not what is computed with them


def _has_tensors(key: Any) -> bool:
    """Return whether an argument with this key is a tensor, or a list with some."""
    return isinstance(key, _TensorKind) or (
        isinstance(key, tuple) and key[0] is list and any(map(_has_tensors, key[1:]))
    )


def operation_name(func: Any) -> str:
    """Return the name of an ATen operation without its overload, or of a higher-order operator."""
    name: str = getattr(func, "overloadpacket", func).__name__
    return name


def _writes_to_a_list(func: Any) -> bool:
    """Return whether an operation writes to the tensors of the list that is its first argument."""
    name = operation_name(func)
    return name.startswith("_foreach_") and name.endswith("_")


def _argument(key: Any) -> Any:
    """Return an argument with this key: a new tensor, a list, or the constant itself."""
    if isinstance(key, _TensorKind):
        return key.empty()
    return [*map(_argument, key[1:])] if key[0] is list else key[1]


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, those in lists too."""
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list):
            yield from _tensors(one)
