"""How small an error is seen in bf16 with fp32 masters? Prints the last table of README.md."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import plait
from plait.engine import Engine, engine
from plait.engine.pipeline.stage import Stage
from plait.engine.sharding import gatherer, reducer
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.ranks.launch.rank_pool import RankPool
from plait.tensor.losses import cross_entropy
from plait.verification.case import Case
from plait.verification.options import VerifyOptions
from plait.verification.rank_verification import RankOutcome, verify_rank
from plait.verification.report import VerificationReport
from plait.verification.verify import build_report

PLAN = plait.Plan(
    pp=2, tp=2, dp=2, microbatches=2, strategy="full", precision="bf16", master_precision="fp32"
)
SCALED = replace(PLAN, loss_scale=1024.0)
NAME = "blocks.0.mlp.up.weight"
FINEST = 30
"""Binary digits: smaller errors are below the rounding of float32."""

Seeded = Callable[[float], Any]
"""Makes the context in which an error of a size lasts."""


def rounded(tensor: Tensor, size: float) -> Tensor:
    """`tensor` as a dtype of machine epsilon `size` rounds it."""
    mantissa, exponent = torch.frexp(tensor.double())
    return torch.ldexp((mantissa / size * 2).round() * size / 2, exponent).to(tensor.dtype)


def instead(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Patch a method or function with what `change` makes of it."""
    return patch.object(owner, name, change(getattr(owner, name)))


def gradient_of_one_parameter(size: float) -> Any:
    """Final gradients of one parameter times 1 + size."""

    def change(original: Callable[..., None]) -> Callable[..., None]:
        def finish(self: FlatBuffer, carried: Tensor | None, scale: float) -> None:
            original(self, carried, scale)
            if NAME in self.shard_gradients:
                self.shard_gradients[NAME].mul_(1 + size)

        return finish

    return instead(FlatBuffer, "finish_gradients", change)


def unscaling_of_one_unit(size: float) -> Any:
    """A loss scale that is removed by another factor from one unit: 1024 · (1 + size)."""

    def change(original: Callable[..., None]) -> Callable[..., None]:
        def finish(self: FlatBuffer, carried: Tensor | None, scale: float) -> None:
            original(self, carried, scale * (1 + size) if NAME in self.parameters else scale)

        return finish

    return instead(FlatBuffer, "finish_gradients", change)


def backward_of_one_layer(size: float) -> Any:
    """Weight gradients of one layer and one micro-batch times 1 + size, as they are computed in bf16."""

    def change(original: Callable[..., None]) -> Callable[..., None]:
        def backward_weight(self: Stage, microbatch: int, number: int) -> None:
            original(self, microbatch, number)
            if microbatch == 0 and self.layers[number].path == "blocks.0.mlp":
                for parameter in self.layers[number].module.parameters():
                    parameter.grad.mul_(1 + size)

        return backward_weight

    return instead(Stage, "backward_weight", change)


def travelling(size: float) -> Any:
    """Gradients travel in a dtype of that machine epsilon (bf16: 2^-7) instead of fp32."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(buffer: FlatBuffer) -> Any:
            buffer.gradient.copy_(rounded(buffer.gradient, size))
            return original(buffer)

        return scatter

    return instead(reducer, "_scatter", change)


def added_up(size: float) -> Any:
    """Gradients of one layer are added up in a dtype of that machine epsilon instead of fp32."""

    def change(original: Callable[..., None]) -> Callable[..., None]:
        def backward_weight(self: Stage, microbatch: int, number: int) -> None:
            original(self, microbatch, number)
            if self.layers[number].path == "blocks.0.mlp":
                for parameter in self.layers[number].module.parameters():
                    parameter.grad.copy_(rounded(parameter.grad, size))

        return backward_weight

    return instead(Stage, "backward_weight", change)


def norm_of_all(size: float) -> Any:
    """The gradient norm times 1 + size."""
    return instead(engine, "start_norm", lambda original: lambda *how: lambda: original(*how)() * (1 + size))


def factor_of_clipping(size: float) -> Any:
    """The factor of clipping times 1 - size, where it clips."""

    def change(original: Callable[..., None]) -> Callable[..., None]:
        def scale(units: Any, norm: Tensor, max_norm: float) -> None:
            original(units, norm, max_norm * (1 - size) if norm > max_norm else max_norm)

        return scale

    return instead(engine, "scale_to", change)


def _after_step(change: Callable[[Engine, torch.optim.Optimizer], None]) -> Any:
    def changed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @torch.no_grad()
        def step(self: Engine, optimizer: torch.optim.Optimizer, *how: Any) -> Tensor:
            norm = original(self, optimizer, *how)
            change(self, optimizer)
            return norm

        return step

    return instead(Engine, "step", changed)


def masters(size: float) -> Any:
    """The optimizer's parameters are kept in a dtype of that machine epsilon instead of fp32."""

    def change(self: Engine, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.copy_(rounded(parameter, size))

    return _after_step(change)


def update_of_one_parameter(size: float) -> Any:
    """One parameter times 1 + size after the step."""
    return _after_step(
        lambda self, _: [p.mul_(1 + size) for name, p in self.named_parameters() if name == NAME] and None
    )


def state_of_one_parameter(size: float) -> Any:
    """One first moment of AdamW times 1 + size after the step."""

    def change(self: Engine, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self.named_parameters():
            if name == NAME and "exp_avg" in optimizer.state.get(parameter, {}):
                optimizer.state[parameter]["exp_avg"].mul_(1 + size)

    return _after_step(change)


def stale_copy(size: float) -> Any:
    """In that part of a rank's shard of one unit, bf16 copies are as they were before the step."""
    before: dict[int, Tensor] = {}

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        @torch.no_grad()
        def gather(buffer: FlatBuffer) -> Any:
            if NAME not in buffer.parameters:
                return original(buffer)
            current = buffer.shard.clone()
            count = int(len(current) * size)
            buffer.shard[:count] = before.setdefault(id(buffer), current)[:count]
            handle = original(buffer)
            buffer.shard.copy_(current)
            return handle

        return gather

    return instead(gatherer, "_gather", change)


def wrong_copy(size: float) -> Any:
    """The bf16 copies of one unit are made of its masters times 1 + size."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        @torch.no_grad()
        def gather(buffer: FlatBuffer) -> Any:
            current = buffer.shard.clone()
            if NAME in buffer.parameters:
                buffer.shard.mul_(1 + size)
            handle = original(buffer)
            buffer.shard.copy_(current)
            return handle

        return gather

    return instead(gatherer, "_gather", change)


KINDS: dict[str, tuple[Seeded, plait.Plan]] = {
    "weight gradients of a layer, in one micro-batch, times 1 + size": (backward_of_one_layer, PLAN),
    "a layer's gradients added up with epsilon size": (added_up, PLAN),
    "gradients travelling with epsilon size": (travelling, PLAN),
    "the final gradient of a parameter times 1 + size": (gradient_of_one_parameter, PLAN),
    "a unit unscaled by 1024 (1 + size)": (unscaling_of_one_unit, SCALED),
    "the norm times 1 + size": (norm_of_all, PLAN),
    "the factor of clipping times 1 - size": (factor_of_clipping, PLAN),
    "masters kept with epsilon size": (masters, PLAN),
    "a parameter after the step times 1 + size": (update_of_one_parameter, PLAN),
    "a first moment after the step times 1 + size": (state_of_one_parameter, PLAN),
    "bf16 copies of masters times 1 + size": (wrong_copy, PLAN),
    "stale bf16 copies in a part of size of a unit": (stale_copy, PLAN),
}


def run_with(seeded: Seeded, size: float, case: Case, plan: plait.Plan) -> RankOutcome:
    """One rank's verification with an error in it."""
    with seeded(size):
        return verify_rank(case, plan)


def verified(
    pool: RankPool, seeded: Seeded, size: float, plan: plait.Plan, hidden: int
) -> VerificationReport:
    """What `plait verify --mode native` says of a model with an error in it."""
    tokens = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(0))
    model = partial(plait.models.gpt2, layers=2, hidden=hidden, heads=4, vocab=256, context=64)
    batches = [(tokens[:, :-1], tokens[:, 1:].contiguous())] * 2
    case = Case(model, cross_entropy, batches, VerifyOptions(mode="native"), timeout=60.0)
    return build_report(pool.run(run_with, seeded, size, case, plan, ranks=plan.world), plan, case.options)


def smallest_seen(pool: RankPool, seeded: Seeded, plan: plait.Plan, hidden: int) -> tuple[str, str]:
    """The smallest power of two that is seen, by bisection, and where the report says that it is."""
    seen, unseen, where = 0, FINEST + 1, "-"
    while unseen - seen > 1:
        digits = (seen + unseen) // 2
        report = verified(pool, seeded, 2.0**-digits, plan, hidden)
        if report.first is None:
            unseen = digits
        else:
            seen, where = digits, report.what(report.first.difference.location)
    return (f"2^-{seen}" if seen else "none below 1"), where


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with RankPool(PLAN.world, threads=1, device="cpu") as pool:
        for plan in (PLAN, SCALED):
            report = verified(pool, lambda size: patch.dict({}), 0.0, plan, options.hidden)
            print(f"without any error: {report.headline()}", flush=True)
        print("\n| error | smallest that is seen | where |\n|---|---|---|")
        for told, (seeded, plan) in KINDS.items():
            size, where = smallest_seen(pool, seeded, plan, options.hidden)
            print(f"| {told} | {size} | {where} |", flush=True)


if __name__ == "__main__":
    main()
