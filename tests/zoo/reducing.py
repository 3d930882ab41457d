"""Mistakes of sums over data-parallel ranks, gathered parameters, the mean loss and the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import engine as gradient_clipping
from plait.engine import runner
from plait.engine.sharding import gatherer, reducer
from plait.plan.plan import Plan
from plait.ranks.collectives import all_reduce
from zoo import cases
from zoo.diagnosed import Mistake
from zoo.exchanging import G, L, Parts, _at, _in_bfloat16, _parts
from zoo.patching import replaced_all_reduce


def _reduced(change: Callable[[Parts, int], Tensor]) -> Any:
    """Sums over dp are what `change` makes of all ranks' gradients and this rank's index."""
    return replaced_all_reduce(
        reducer, "dp", lambda tensor, group: tensor.copy_(change(_parts(tensor, group), group.index))
    )


def dp_summed_twice() -> Any:
    return _reduced(lambda parts, own: sum(parts) * len(parts))  # type: ignore[arg-type]


def dp_largest() -> Any:
    return _reduced(lambda parts, own: torch.stack(parts).amax(0))


def dp_only_the_first_rank() -> Any:
    return _reduced(lambda parts, own: parts[0])


def dp_others_only() -> Any:
    return _reduced(lambda parts, own: parts[1 - own])


def dp_in_bfloat16() -> Any:
    return _reduced(lambda parts, own: sum(map(_in_bfloat16, parts)))  # type: ignore[arg-type]


def dp_in_bfloat16_at_the_end() -> Any:
    return _reduced(lambda parts, own: _in_bfloat16(sum(parts)))  # type: ignore[arg-type]


def dp_not_at_all() -> Any:
    return _reduced(lambda parts, own: parts[own])


def dp_own_weighted_double() -> Any:
    return _reduced(lambda parts, own: sum(parts) + parts[own])  # type: ignore[arg-type]


def dp_negative() -> Any:
    return _reduced(lambda parts, own: -sum(parts))  # type: ignore[arg-type]


def dp_first_half_only() -> Any:
    """Of each buffer."""

    def change(parts: Parts, own: int) -> Tensor:
        total = sum(parts)
        total[len(total) // 2 :] = parts[own][len(total) // 2 :]  # type: ignore[index]
        return total  # type: ignore[return-value]

    return _reduced(change)


def dp_shifted() -> Any:
    """The other rank's gradients lie one element later in the buffer."""
    return _reduced(lambda parts, own: parts[own] + parts[1 - own].roll(1))


# shards of parameters


def _gathered(change: Callable[[Tensor, int, int], None]) -> Any:
    """What was gathered is changed by `change`, which is given the number of ranks and this one's index."""
    original = gatherer.all_gather

    def gather(own: Tensor, group: Any, *, out: Tensor, **options: Any) -> Any:
        whole = original(own, group, out=out, **options).wait()
        change(whole, group.size, group.index)
        return type(original(own, group)).done(whole, group)

    return patch.object(gatherer, "all_gather", gather)


def others_shards_are_zero() -> Any:
    def change(whole: Tensor, size: int, own: int) -> None:
        for index, shard in enumerate(whole.chunk(size)):
            if index != own:
                shard.zero_()

    return _gathered(change)


def own_shard_everywhere() -> Any:
    def change(whole: Tensor, size: int, own: int) -> None:
        mine = whole.chunk(size)[own].clone()
        for shard in whole.chunk(size):
            shard.copy_(mine)

    return _gathered(change)


def gathered_in_bfloat16() -> Any:
    return _gathered(lambda whole, size, own: whole.copy_(_in_bfloat16(whole)))  # type: ignore[arg-type,return-value]


# the mean and the norm


def mean_of_one_rank() -> Any:
    """The mean loss is not summed over ranks."""
    return replaced_all_reduce(runner, "world", lambda tensor, group: tensor)


def mean_averaged() -> Any:
    return replaced_all_reduce(
        runner, "world", lambda tensor, group: all_reduce(tensor, group).wait() / group.size
    )


def norm_of_absolute_values() -> Any:
    """The sum of absolute values in the place of the root of squares."""

    def start(units: Any, *_: Any) -> Callable[[], Tensor]:
        found = [buffer.gradient.abs().sum() for unit in units for buffer in unit.trainable]
        return lambda: torch.stack(found).sum()

    return patch.object(gradient_clipping, "start_norm", start)


@contextmanager
def gradients_changed_after_the_step() -> Iterator[None]:
    """Something adds to a gradient when all is done."""
    original = reducer.Reducer.finish

    def finish(self: Any) -> None:
        original(self)
        for unit in self.units.values():
            for buffer in unit.trainable:
                if buffer.gradient is not None:
                    buffer.gradient.mul_(1.5)

    with patch.object(reducer.Reducer, "finish", finish):
        yield


ONE, DP, FULL = Plan(microbatches=3), cases.TWO_COPIES_OF_THREE, cases.CUT_PARAMETERS
REDUCING: tuple[Mistake, ...] = (
    _at(DP, dp_summed_twice, G, "2 times .* size of dp", "factor", "sum"),
    _at(DP, dp_largest, G, "reduction", "sum"),
    _at(DP, dp_only_the_first_rank, G, "reduction|only", "sum"),
    _at(DP, dp_others_only, G, "over dp is missing|reduction", "sum"),
    _at(DP, dp_in_bfloat16, G, "16", "bfloat16", "float32"),
    _at(DP, dp_in_bfloat16_at_the_end, L, "bfloat16", "bfloat16"),
    _at(DP, dp_not_at_all, L, "over dp is missing", "sum"),
    _at(DP, dp_own_weighted_double, G, "reduction", "sum"),
    _at(DP, dp_negative, L, "-1 times", "factor"),
    _at(DP, dp_first_half_only, G, "over dp is missing|reduction", "sum"),
    _at(DP, dp_shifted, G, "reduction", "order"),
    _at(FULL, others_shards_are_zero, G, "zero"),
    _at(
        FULL,
        own_shard_everywhere,
        G,
        "gathered",
    ),
    _at(FULL, gathered_in_bfloat16, G, "bfloat16", "bfloat16"),
    _at(DP, mean_of_one_rank, G, "sum over dp|another weight|not all", "sum"),
    _at(DP, mean_averaged, G, "1/2 .* dp", "factor", "sum"),
    _at(ONE, norm_of_absolute_values, G, "another norm|scaled"),
    _at(ONE, gradients_changed_after_the_step, G, "3/2 times", "factor"),
)
