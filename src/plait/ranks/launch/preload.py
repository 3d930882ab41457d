"""The module that the fork server of rank processes imports: it imports the packages that every rank needs.

Optimizers import torch's compiler when first used, which takes half a second, and the rest of plait takes a
fifth of one: each rank would do it for itself.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

_MODULES = ("torch", "torch._dynamo", "plait.ranks.launch.rank_main_loop", "plait.engine.parallelize")


def _import_all() -> None:
    """Import `_MODULES` with the garbage collector off: it would find nothing in them to free.

    Later collections pass over them too, in the fork server and in the ranks: these keep sharing the memory.
    """
    gc.disable()
    try:
        for name in _MODULES:
            with suppress(ImportError):  # the rank that imports it reports the error
                import_module(name)
        gc.freeze()
    finally:
        gc.enable()


_import_all()
