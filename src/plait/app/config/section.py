"""`Section`, the base class of the sections of the configuration, and types of their fields."""

from __future__ import annotations

from math import inf
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def is_positive_number(text: str) -> bool:
    """Return whether `text` spells a finite number above 0."""
    try:
        return 0 < float(text) < inf
    except ValueError:
        return False


class Section(BaseModel):
    """Base class of the sections: frozen, rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
