"""The private names of torch that compiled layers rely on, each in one function; a lock to compile once.

`tests/unit/engine/compilation/test_torch_compiler.py` shows what is relied on.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from plait.errors import PlanError
from plait.files import owner_of, try_lock, unlock
from plait.ranks.accelerator import keep_stand_in_for_gpus

PATIENCE = 600.0
"""Seconds, as torch waits for its own locks."""
_SECONDS_BETWEEN_TRIES = 0.02


@contextmanager
def generating_alone(graph: str, cache: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Context manager that holds the lock of a graph in torch's cache folder, while its code is generated.

    `graph`: a text that identifies it. Another process that holds the lock is waited for, at most `patience`
    seconds; then a warning names it. Where no file can be locked in `cache`, nobody is waited for.
    """
    path, file = cache / f"plait-{sha256(graph.encode()).hexdigest()[:32]}.lock", None
    start = time.monotonic()
    with suppress(OSError):
        while (file := try_lock(path)) is None and time.monotonic() - start < patience:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        if file is None:
            warnings.warn(
                f"{owner_of(path)} has generated the code of a layer for {patience:g} seconds ({path}): this "
                "rank generates its own.",
                stacklevel=1,
            )
    try:
        yield
    finally:
        if file is not None:
            unlock(path, file)


GraphCall = Callable[[list[Tensor]], Sequence[Tensor]]
"""Returns the results of a graph for a list of its arguments, which it may empty."""

COMPILER_LOCK = RLock()
"""Held while torch traces or generates code, which it does with state of the whole process."""


def without_memory() -> FakeTensorMode:
    """Return a context in which tensors have a shape, dtype and device, but no memory and no values."""
    keep_stand_in_for_gpus()
    return FakeTensorMode(allow_non_fake_inputs=True)


def joint_graph(
    function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor], *, differentiates: bool
) -> GraphModule:
    """Return the graph of `function` and its backward, of ATen operations that write to no tensor.

    Its placeholders are the arguments, then the gradients of the results that require one; its output is a
    list of the results, then the gradient of each argument or None. Without `differentiates` it has no
    gradients. `arguments` are of the context `without_memory`.
    """
    from torch._functorch.aot_autograd import aot_export_joint_simple  # loads hundreds of modules

    graph: Any = aot_export_joint_simple(function, tuple(arguments), trace_joint=differentiates)
    return cast(GraphModule, graph)


def example_of(node: Node) -> Tensor:
    """Return a tensor without memory that has the shape and dtype of a traced graph node's value."""
    return cast(Tensor, node.meta["val"])


def move_to_meta(graph: GraphModule) -> None:
    """Replace each device among the arguments of `graph`'s operations by the meta device, in place."""

    def moved(argument: Any) -> Any:
        return torch.device("meta") if isinstance(argument, torch.device) else argument

    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)


def is_view(node: Node) -> bool:
    """Return whether a node's operation returns its first argument's memory in another shape."""
    if node.target == torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and not alias.is_write and len(schema.returns) == 1


def is_random(node: Node) -> bool:
    """Return whether a node's operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def with_generated_code(graph: GraphModule) -> GraphCall:
    """Return `graph` compiled by TorchInductor, for arguments like the examples of its placeholders.

    `graph` writes to no argument. The result is the generated function itself: around it torch puts wrappers
    for subclasses, mutations and the profiler, which take as long as a small layer. One of the processes of a
    host that ask for the same code generates it; the others find it in torch's cache on the disk.
    """
    from torch._functorch import config  # these load hundreds of modules
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[Any] = []

    def compile_and_note(*arguments: Any, **named: Any) -> Any:
        found.append(compile_fx_inner(*arguments, **named))
        return found[-1]

    given = [example_of(node) for node in graph.graph.nodes if node.op == "placeholder"]
    # Without a ShapeEnv torch leaves its cache on the disk alone.
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True):
        examples = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in given
        ]
    shapes = [(one.shape, one.stride(), one.dtype, one.device) for one in given]
    with (
        torch.no_grad(),
        config.patch(enable_autograd_cache=False),  # a hit would not come here
        generating_alone(f"{graph.code} {shapes}", code_cache()),
    ):
        compile_fx(graph, examples, inner_compile=compile_and_note)
    (compiled,) = found
    return cast(GraphCall, getattr(compiled, "current_callable", compiled))  # itself, if nothing is computed


def code_cache() -> Path:
    """Return the existing folder in which torch keeps generated code.

    Raises `PlanError` where it is in the folder for temporary files, and another user could write there:
    ranks run what is in it.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    about = folder.stat()
    is_own = about.st_uid in (os.geteuid(), 0) and not about.st_mode & stat.S_IWOTH
    if folder.parent == Path(tempfile.gettempdir()) and not is_own:
        raise PlanError(
            f"{folder}, whose code ranks with compiled layers run, is open to other users: remove it, or set "
            "TORCHINDUCTOR_CACHE_DIR to a folder of your own."
        )
    return folder
