"""`RankJob`: a pickled function call for one rank, with environment and settings of its parent process."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import cloudpickle
from torch import Tensor

from plait.errors import ModelError, PlaitError
from plait.ranks.gradient_hook_detection import first_gradient_hook
from plait.ranks.launcher_environment import World, without_launcher


@dataclass(frozen=True)
class RankJob:
    """A function call for one rank, with the settings of the parent process that it may depend on."""

    call: bytes  # the function and its arguments, pickled
    world: World
    folder: str  # of this run only: for the rendezvous and the stack files
    environment: dict[str, str]
    directory: str
    path: list[str]
    main_file: str | None  # of the main module, which processes started by the rank import
    start_method: str  # of multiprocessing in the rank
    threads: int
    timeout: float
    device: str
    ranks_per_gpu: int = 1
    goes_on: bool = False  # whether the process takes another job after one that failed
    run_folder: str | None = None  # with the folders of all generations of an elastic run
    other_hosts: frozenset[str] = frozenset()  # the addresses of hosts of the world besides this one

    @staticmethod
    def of_this_process(
        call: bytes,
        world: World,
        folder: str,
        *,
        threads: int,
        timeout: float,
        device: str,
        ranks_per_gpu: int = 1,
        goes_on: bool = False,
        run_folder: str | None = None,
        other_hosts: frozenset[str] = frozenset(),
        variables: Mapping[str, str] = types.MappingProxyType({}),
    ) -> RankJob:
        """Return a job with the environment, directory and module path of this process.

        `variables`: environment variables that the rank has besides; it has none of a launcher.
        """
        return RankJob(
            call=call,
            world=world,
            folder=folder,
            environment={**without_launcher(os.environ), **variables},
            directory=os.getcwd(),
            path=list(sys.path),
            main_file=getattr(sys.modules["__main__"], "__file__", None),
            start_method=start_method(),
            threads=threads,
            timeout=timeout,
            device=device,
            ranks_per_gpu=ranks_per_gpu,
            goes_on=goes_on,
            run_folder=run_folder,
            other_hosts=other_hosts,
        )


def stack_file(folder: str, rank: int) -> Path:
    """Return the path of the file where a rank writes its stack on SIGUSR2, or when it crashes."""
    return Path(folder, f"stack-{rank}")


def start_method() -> str:
    """Return the `multiprocessing` start method for ranks' own processes, such as `DataLoader` workers.

    The default is fork where that is safe: forked processes have the classes of the caller's main module,
    which a new process could not import.
    """
    default = multiprocessing.get_all_start_methods()[0]
    chosen = multiprocessing.get_start_method(allow_none=True) or default
    return "fork" if chosen == default and sys.platform == "linux" else chosen


FunctionCall = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which also records the objects of the main module that it pickles by value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Called by `pickle` for each object: note objects of the main module, pickled by value.

        Raises ModelError for a tensor with hooks on its gradient, which the pickled one would not have.
        """
        hook = first_gradient_hook({"": thing}) if isinstance(thing, Tensor) else None
        if hook is not None:
            raise ModelError(
                f"a tensor {list(thing.shape)} has a hook of {hook[1]}, which would not reach the ranks' "
                "processes: register it in the function that the ranks run."
            )
        if _is_in_main(thing):
            outermost = thing.__qualname__.partition(".")[0]
            self.of_main[outermost] = getattr(sys.modules["__main__"], outermost)
            self.of_main.setdefault(thing.__name__, thing)  # cloudpickle forgets where a class was nested
        return super().reducer_override(thing)


def dumps_call(call: FunctionCall) -> bytes:
    """Return a pickled call; classes and functions of the main module are included by value.

    Raises the errors of `cloudpickle` for objects that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(call)
    pickler.dump(dict(pickler.of_main))  # the same objects, since a pickler keeps a memo
    return file.getvalue()


def loads_call(data: bytes) -> FunctionCall:
    """Return the call in `data`, and define in this main module the classes and functions that it needs.

    `pickle` looks them up there by name: when a worker of a `DataLoader` sends a batch of a class of the main
    module, or when `torch.save` writes a model.
    """
    unpickler = pickle.Unpickler(io.BytesIO(data))
    call: FunctionCall = unpickler.load()
    vars(sys.modules["__main__"]).update(unpickler.load())
    return call


def dumps_result(result: object, rank: int) -> bytes:
    """Return a rank's result as bytes. Raises `PlaitError` where it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise PlaitError(
            f"rank {rank}'s result, of type {type(result).__name__}, cannot be sent to other processes "
            f"({error}): return numbers, text, tensors and containers of them."
        ) from error
    return data


def _is_in_main(thing: Any) -> bool:
    """Return whether `thing` is a class or function that `pickle` finds by name in the main module."""
    if getattr(thing, "__module__", None) != "__main__" or not hasattr(thing, "__qualname__"):
        return False
    try:
        return attrgetter(thing.__qualname__)(sys.modules["__main__"]) is thing
    except AttributeError:
        return False


def pickled_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments pickled. Raises `PlaitError` where they cannot be."""
    try:
        return dumps_call((function, arguments))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise PlaitError(
            f"the function {name} or its arguments cannot be sent to the ranks ({error}): "
            "build what cannot be pickled inside the function."
        ) from error


def unpickled_result(result: bytes, rank: int) -> Any:
    """Return the result that a rank has sent. Raises `PlaitError` where it cannot be read here."""
    try:
        return pickle.loads(result)
    except Exception as error:
        raise PlaitError(
            f"rank {rank}'s result cannot be read here ({type(error).__name__}: {error}): "
            "return numbers, text, tensors and containers of them."
        ) from error
