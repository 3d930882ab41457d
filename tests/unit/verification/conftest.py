"""A verification whose candidate is wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from plait.engine import Engine
from plait.verification import rank_verification

Break = Callable[[Engine], None]
Replace = Callable[[nn.Sequential], nn.Sequential]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have each engine that is verified damaged after it was made, or made of another model."""
    right = rank_verification.parallelize

    def install(damage: Break = lambda engine: None, replace: Replace = lambda model: model) -> None:
        def parallelize(model: nn.Sequential, *arguments: Any, **options: Any) -> Engine:
            engine = right(replace(model), *arguments, **options)
            damage(engine)
            return engine

        monkeypatch.setattr(rank_verification, "parallelize", parallelize)

    return install
