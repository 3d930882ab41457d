"""What is measured on 1, 2, 4 and 8 GPUs: plans of plait, and what of PyTorch stands beside each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_RANKS = 8


@dataclass(frozen=True)
class Configuration:
    """A plan, on how many ranks, and its peer; None: only its memory is measured."""

    name: str
    ranks: int
    plan: dict[str, Any]
    peer: str | None = None


def ranks_of(count: int) -> int:
    """Return how many of `count` GPUs are used: 1, 2, 4 or 8."""
    return min(MOST_RANKS, 1 << (count.bit_length() - 1))


def configurations(ranks: int) -> list[Configuration]:
    """Return the configurations of one rank, then those of all `ranks`."""
    alone = [
        Configuration("one rank", 1, {}, "plain PyTorch"),
        Configuration("one rank, recompute selective", 1, {"recompute": "selective"}),
        Configuration("one rank, recompute full", 1, {"recompute": "full"}),
    ]
    return alone if ranks == 1 else [*alone, *data_parallel(ranks), *combined(ranks)]


def data_parallel(ranks: int) -> Iterator[Configuration]:
    """Yield data-parallel plans, beside DDP and FSDP2."""
    full = {"dp": ranks, "strategy": "full"}
    yield Configuration(f"dp {ranks}", ranks, {"dp": ranks}, "DDP")
    yield Configuration(f"dp {ranks}, full", ranks, full, "FSDP2")
    each = full | {"reduce": "each"}
    yield Configuration(f"dp {ranks}, full, reduced each", ranks, each, "FSDP2, reduced each")
    masters = full | {"master_precision": "fp32"}
    yield Configuration(f"dp {ranks}, full, masters fp32", ranks, masters, "FSDP2, masters fp32")


def combined(ranks: int) -> Iterator[Configuration]:
    """Yield plans with `tp` and `pp`, beside FSDP2 on the same GPUs."""
    plans: list[dict[str, Any]] = [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": "regather"},
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zb-v"},
    ]
    plans += [{"pp": 2, "tp": 2, "schedule": "1f1b"}] if ranks >= 4 else []
    plans += [{"pp": 4, "schedule": "zb-v"}] if ranks >= 8 else []
    for plan in plans:
        dp = ranks // (plan.get("pp", 1) * plan.get("tp", 1))
        # Stages gather for every micro-batch: there only the optimizer's state is sharded.
        shared = {"dp": dp, "strategy": "optimizer" if "pp" in plan else "full"} if dp > 1 else {}
        yield Configuration(named(plan | shared), ranks, plan | shared, "FSDP2")


def named(plan: dict[str, Any]) -> str:
    """Return the name of a plan, such as `pp 2 × dp 4, zb-v, optimizer`."""
    axes = [f"{axis} {plan[axis]}" for axis in ("pp", "tp", "dp") if axis in plan]
    rest = [plan[field] for field in ("schedule", "strategy") if field in plan]
    cut = [f"sequence {plan['sequence_parallel']}"] if "sequence_parallel" in plan else []
    return ", ".join([" × ".join(axes), *rest, *cut])
