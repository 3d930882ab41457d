"""Checks that all ranks use the same optimizer options, clipping and settings in a step.

    over world          the calls of `forward_backward`, the arguments of `clip_grad_norm_` and
                        `parameter_groups`, the loss scale, torch's settings
    over world          of ranks with an optimizer: how often gradients were added up, the class, defaults and
                        steps of the optimizer
    over dp_cp and tp   the optimizer and the options of each parameter

An optimizer is known when it is given to an engine, or from its first step. Ranks compare at their first call
of `forward_backward` and of `clip_grad_norm_`, at the second, the fourth, the eighth …: others cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from plait.engine.fingerprint import settings_lines
from plait.engine.runner import Runtime
from plait.engine.sharding.loss_scale import LossScale
from plait.errors import CommunicationError, PlaitError
from plait.models.layers.comparable_value_text import ValueTexts
from plait.plan.axes import STAGE_AXES
from plait.proof.optimizer_proof import is_free_of_order
from plait.ranks.consistency_check import all_numbers, different_texts
from plait.ranks.transport.call_description import shown


class StepAgreement:
    """Records a rank's optimizers, options and calls, and raises an error if they differ between ranks."""

    def __init__(self, runtime: Runtime, scale: LossScale) -> None:
        """`scale`: the engine's loss scale."""
        self._mesh, self._dropout, self._scale = runtime.mesh, runtime.dropout, scale
        self._names = {id(parameter): name for name, parameter in runtime.named_parameters()}
        self._calls: Counter[str] = Counter()
        self._accumulated = 0
        """Calls of `forward_backward` since the optimizers' gradients were None."""
        self._options: dict[str, object] = {}
        """Those of the latest calls, by name."""
        self.decays: set[float | None] = set()
        """With which weight decays `parameter_groups` were made; None: the optimizer's default."""
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many steps each optimizer has taken since ranks compared."""
        self._latest: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """After which call of `forward_backward` each optimizer stepped, or was given, last."""

    def note_optimizer(self, optimizer: Optimizer, steps: int = 1) -> None:
        """Record an optimizer, and `steps` that it is about to take, for the next comparison of ranks.

        One without parameters of this rank, such as that of a stage that has none, is as good as none.
        """
        if not any(id(one) in self._names for group in optimizer.param_groups for one in group["params"]):
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + steps
        self._latest[optimizer] = self._calls["forward_backward"]

    def note_gradients(self) -> None:
        """Count one more `forward_backward` whose gradients add up, for the next comparison."""
        self._accumulated = self._accumulated + 1 if self._has_gradients() else 1

    def _has_gradients(self) -> bool:
        """Return whether an optimizer has a gradient of a parameter of this rank."""
        for optimizer in self._latest_optimizers():
            for group in optimizer.param_groups:
                for one in group["params"]:
                    if one.grad is not None and id(one) in self._names:
                        return True
        return False

    def compare_at(self, call: str, **options: object) -> None:
        """Count calls of `call`; at the 1st, 2nd, 4th, 8th … raise where settings differ between ranks.

        `options`: those of the call. Communication: as `compare`. Raises CommunicationError.
        """
        self._calls[call] += 1
        self._options |= options
        if self._calls[call].bit_count() == 1:
            self.compare(call, CommunicationError)

    def compare(self, call: str, error_type: type[PlaitError]) -> None:
        """Raise an `error_type` on every rank of a group whose ranks have recorded different things.

        Communication: 520 bytes over `world`, 256 over `dp_cp` and `tp`; more where ranks differ.
        """
        alike = [*settings_lines(), f"engine.passes = {self._dropout.step}"]
        alike += [f"the loss scale = {self._scale.value}"]
        alike += [f"calls of {name} = {count}" for name, count in sorted(self._calls.items())]
        alike += [f"{name} = {ValueTexts().of(one)}" for name, one in sorted(self._options.items())]
        self._require("world", alike, call, error_type)
        optimizers, world = self._latest_optimizers(), self._mesh.group("world")
        # With several a stage may have matrices only, and so one of them.
        single = max(all_numbers(len(optimizers), world, self._mesh.device, call)) == 1
        lines = self._of_optimizers(optimizers, single=single)
        self._require("world", lines, call, error_type, optional=True)
        for axis in STAGE_AXES:
            self._require(axis, self._of_parameters(optimizers), call, error_type, optional=True)
        self._steps.clear()

    def _require(
        self,
        axis: str,
        lines: Iterable[str],
        call: str,
        error_type: type[PlaitError],
        *,
        optional: bool = False,
    ) -> None:
        group = self._mesh.group(axis)
        text = "".join(f"{line}\n" for line in lines)
        versions = different_texts(text, group, self._mesh.device, about=call, optional=optional)
        if versions:
            raise error_type(
                f"the ranks of {axis} do not agree ({call}; {shown(versions)}): make the same calls with the "
                "same optimizer and options on each, in each step."
            )

    def _latest_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that took a step, or were given to the engine, most recently."""
        latest = max(self._latest.values(), default=0)
        return [one for one, when in self._latest.items() if when == latest]

    def _of_optimizers(self, optimizers: list[Optimizer], *, single: bool) -> Iterator[str]:
        """Yield texts of the optimizer settings that ranks compare; `single`: also class and defaults."""
        if optimizers:
            yield f"calls of forward_backward since zero_grad = {self._accumulated}"
        if optimizers and single:
            optimizer, texts = optimizers[0], ValueTexts()
            yield f"optimizer = {texts.of_class(type(optimizer))}"
            yield from (f"optimizer.defaults: {line}" for line in _lines(optimizer.defaults, texts))
            yield from self._of_made_groups(optimizer, texts)
            yield f"steps of the optimizer since ranks compared = {self._steps.get(optimizer, 0)}"

    def _of_made_groups(self, optimizer: Optimizer, texts: ValueTexts) -> Iterator[str]:
        """Yield the options of groups that `Engine.parameter_groups` made, which are those of all stages.

        Of other groups nothing is known: a stage may have rates of its own.
        """
        groups = optimizer.param_groups
        decays = [group.get("weight_decay") for group in groups]
        own = optimizer.defaults.get("weight_decay")
        made = {own if decay is None else decay for decay in self.decays}
        if len(decays) != 2 or decays[0] not in made or decays[1] != 0:
            yield "engine.parameter_groups = not used"
            return
        for name, group in zip(("matrices", "others"), groups, strict=True):
            yield from (f"{name} of engine.parameter_groups: {line}" for line in _lines(group, texts))

    def _of_parameters(self, optimizers: list[Optimizer]) -> Iterator[str]:
        """Yield the options of each parameter's group; the order too, where an optimizer may depend on it."""
        texts, groups = ValueTexts(), {}
        for optimizer in optimizers:
            kind, free = texts.of_class(type(optimizer)), is_free_of_order(optimizer)
            for group in optimizer.param_groups:
                members = [self._names[id(one)] for one in group["params"] if id(one) in self._names]
                if members:
                    parameters = ", ".join(sorted(members) if free else members)
                    groups[min(members)] = [
                        *(f"optimizer = {kind}", *_lines(group, texts), f"parameters = {parameters}")
                    ]
        for first, lines in sorted(groups.items()):
            yield from (f"the group of {first}: {line}" for line in lines)


def _lines(options: Mapping[str, object], texts: ValueTexts) -> Iterator[str]:
    """Yield `name = value` of a parameter group's options, or an optimizer's defaults, sorted by name."""
    names = sorted(name for name in options if name not in ("params", "param_names"))
    return (f"{name} = {texts.of(options[name])}" for name in names)
