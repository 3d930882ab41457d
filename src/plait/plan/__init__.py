"""The plan of a run, and all that follows from it before there are ranks: rules, axes, units, layouts."""

from typing import TYPE_CHECKING, Any

from plait.package import public_name

if TYPE_CHECKING:
    from plait.plan.plan import Plan as Plan


def __getattr__(name: str) -> Any:
    return public_name(__name__, name, {"plait.plan.plan": ("Plan",)})
