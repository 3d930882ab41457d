"""What `likely` may say of a mistake whose cause is known: the cause, or nothing false."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from parity import case as parity
from plait.plan.plan import Plan
from plait.verification.options import VerifyOptions
from zoo.row import ONE_STEP

CLAIMS = {
    "bfloat16": r"bfloat16",
    "float16": r"\bfloat16",
    "float32": r"float32",
    "bias": r"\bbias",
    "targets": r"other targets|targets (are )?shifted",
    "factor": r"is \S+ (. \S+ )?times what it should be",
    "order": r"another order|permut|shifted|transposed|revers",
    "region": r"\bregion",
    "cut": r"when it is cut|from shards|shards of the classes|a cut |cut over tp|only a shard"
    r"|parameters differ",
    "sum": r"sum over \w+ is missing|averaged|taken twice|every rank",
    "rows": r"these rows are left out|counted twice",
    "residual": r"residual",
}
"""What a sentence may claim, as patterns."""


@dataclass(frozen=True)
class Mistake:
    """A mistake whose cause is known, where it is shown, and what is true of it."""

    defect: Callable[[], AbstractContextManager[object]]
    model: parity.Case
    plan: Plan
    cause: str
    """A pattern of what names the cause, or, where many causes give such numbers, of the place of it."""
    true: frozenset[str]
    """Of `CLAIMS`, those that hold."""
    options: VerifyOptions = ONE_STEP

    @property
    def name(self) -> str:
        """What is wrong."""
        return self.defect.__name__

    def false_in(self, cause: str) -> list[str]:
        """The claims of a sentence that do not hold."""
        claimed = (what for what, said in CLAIMS.items() if re.search(said, cause))
        return [what for what in claimed if what not in self.true]

    def is_named_in(self, cause: str) -> bool:
        """Whether a sentence says what the numbers show."""
        return re.search(self.cause, cause) is not None
