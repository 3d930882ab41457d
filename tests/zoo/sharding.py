"""Mistakes of parameters that are cut between ranks: their shards, gathers, offload, the optimizer's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from plait.engine import Engine
from plait.engine import parallelize as composer
from plait.engine.pipeline.stage import Stage
from plait.engine.sharding import gatherer
from plait.engine.sharding.flat_buffer import FlatBuffer
from plait.engine.sharding.gatherer import Gatherer
from plait.engine.sharding.unit import UnitFactory
from plait.ranks.collectives import all_gather
from plait.ranks.group import Group
from plait.ranks.handle import Handle
from plait.verification.step_location import StepPhase
from zoo import cases
from zoo.patching import in_single
from zoo.row import ONE_STEP, TWO_STEPS, Named, Row

TIED = "embedding.token.weight"


@contextmanager
def initial_shards_exchanged() -> Iterator[None]:
    """Each rank's shards begin with the values of the other's."""
    original = UnitFactory._fill

    def fill(self: UnitFactory, buffer: FlatBuffer) -> None:
        original(self, buffer)
        whole = torch.zeros(buffer.spec.offsets.size, dtype=buffer.whole.dtype)
        for slot in buffer.spec.offsets.slots:
            slot.view_of(whole).copy_(self.value_of(slot.name))
        group = buffer.shard_group
        assert group is not None
        buffer.shard.copy_(whole.chunk(group.size)[1 - group.index])

    with patch.object(UnitFactory, "_fill", fill):
        yield


def _gathered(change: Callable[[Tensor, Group], None]) -> Any:
    """What was gathered is changed before anybody sees it."""
    original = gatherer.all_gather

    def gather(own: Tensor, group: Group, *, out: Tensor, **options: Any) -> Handle[Tensor]:
        whole = original(own, group, out=out, **options).wait()
        change(whole, group)
        return Handle.done(whole, group)

    return patch.object(gatherer, "all_gather", gather)


def gathered_in_reverse() -> Any:
    """The shards of the last rank stand first."""
    return _gathered(lambda whole, group: whole.copy_(torch.cat(whole.chunk(group.size)[::-1])))


def gathered_in_single_precision() -> Any:
    """Shards lose half of their digits on their way."""
    return _gathered(lambda whole, group: whole.copy_(in_single(whole)))


def shard_of_one_rank_stays_old() -> Any:
    """Others see rank 1's shards as they were in the first step."""
    seen: dict[int, Tensor] = {}

    def change(whole: Tensor, group: Group) -> None:
        theirs = whole.chunk(group.size)[1]
        first = seen.setdefault(whole.data_ptr(), theirs.clone())
        if group.index != 1:
            theirs.copy_(first)

    return _gathered(change)


@contextmanager
def _kept(when: Callable[[], bool]) -> Iterator[None]:
    """What was gathered for the step before counts as current."""
    original = Gatherer.begin

    def begin(self: Gatherer) -> None:
        before = self.gathered
        original(self)
        if when():
            self.gathered = before

    with patch.object(Gatherer, "begin", begin):
        yield


def gathered_once_and_for_all() -> Any:
    """Nobody asks whether an optimizer has changed the shards."""
    return _kept(lambda: True)


def evaluated_on_parameters_of_the_step_before() -> Any:
    """Likewise, but only in evaluation."""
    return _kept(lambda: not torch.is_grad_enabled())


@contextmanager
def gathered_before_the_optimizer() -> Iterator[None]:
    """The first layer's parameters are gathered ahead of the next step, when the optimizer's is to come."""
    begin, finish = Gatherer.begin, Gatherer.finish
    early: set[str] = set()

    def gather_ahead(self: Gatherer) -> None:
        finish(self)
        for name in (TIED, "embedding"):
            self.gather(name)
            self.wait(name)
            early.add(name)

    def believe(self: Gatherer) -> None:
        begin(self)
        self.gathered.update(early)

    with patch.object(Gatherer, "finish", gather_ahead), patch.object(Gatherer, "begin", believe):
        yield


@contextmanager
def released_before_its_backward() -> Iterator[None]:
    """The backward of the MLP finds room where its parameters were, and zeros in it."""
    original = Stage.backward_input

    def backward_input(self: Stage, microbatch: int, number: int) -> None:
        if self.layers[number].path == cases.MLP:
            for parameter in self.layers[number].module.parameters():
                parameter.data.zero_()
        original(self, microbatch, number)

    with patch.object(Stage, "backward_input", backward_input):
        yield


@contextmanager
def gathered_over_replicate() -> Iterator[None]:
    """Gathered between ranks that all have the same shard."""
    original = composer.build_units
    meshes: list[Any] = []

    def build_units(blueprint: Any, spans: Any, mesh: Any, source: Any) -> Any:
        meshes.append(mesh)
        return original(blueprint, spans, mesh, source)

    def gather(own: Tensor, group: Group, **options: Any) -> Handle[Tensor]:
        return all_gather(own.clone(), meshes[-1].group("replicate"), **options)

    with (
        patch.object(composer, "build_units", build_units),
        patch.object(gatherer, "all_gather", gather),
    ):
        yield


@contextmanager
def shard_not_brought_back() -> Iterator[None]:
    """What the optimizer has done to a shard on the device is not copied to the CPU."""
    original = FlatBuffer.copy_back
    begun: set[int] = set()

    def copy_back(self: FlatBuffer) -> None:
        if id(self) in begun and self.device_copy is not None:
            self.device_copy.copy_(self.shard)
        begun.add(id(self))
        original(self)

    with patch.object(FlatBuffer, "copy_back", copy_back):
        yield


@contextmanager
def shard_not_sent_to_the_device() -> Iterator[None]:
    """After the first step a rank shows the others what is on its device, not what is on the CPU."""
    original = gatherer._gather
    sent: set[int] = set()

    def gather(buffer: FlatBuffer) -> Handle[Tensor] | None:
        if id(buffer) not in sent or buffer.shard_group is None:
            sent.add(id(buffer))
            return original(buffer)
        return all_gather(buffer.own, buffer.shard_group, out=buffer.whole, checked=False)

    with patch.object(gatherer, "_gather", gather):
        yield


def _groups(change: Callable[[Engine, list[Any]], list[dict[str, Any]]]) -> Any:
    """The optimizer is given other groups, made of the engine and of all trainable shards."""
    original = Engine.parameter_groups

    def parameter_groups(self: Engine, weight_decay: float) -> list[dict[str, Any]]:
        return change(self, [p for group in original(self, weight_decay) for p in group["params"]])

    return patch.object(Engine, "parameter_groups", parameter_groups)


def wholes_are_stepped() -> Any:
    """The optimizer has what layers use, whose gradients are not there any more."""

    def wholes(engine: Engine, shards: list[Any]) -> list[dict[str, Any]]:
        units = engine.runtime.units.values()
        every = [parameter for unit in units for parameter in unit.parameters.values()]
        return [{"params": every, "weight_decay": 0.1}]

    return _groups(wholes)


def flat_shards_do_not_decay() -> Any:
    """A shard of a matrix that is a part of a row is taken for a vector."""

    def by_rows(engine: Engine, shards: list[Any]) -> list[dict[str, Any]]:
        matrices = [shard for shard in shards if shard.dim() >= 2 and len(shard) != 1]
        vectors = [shard for shard in shards if shard.dim() < 2 or len(shard) == 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]

    return _groups(by_rows)


def _row(phase: StepPhase, defect: Any, plan: Any, model: Any = cases.GPT2, **more: Any) -> Row:
    shown = {key: more.pop(key) for key in ("options", "missed", "unexplained", "full") if key in more}
    return Row(defect=defect, model=model, plan=plan, named=Named(phase=phase, **more), **shown)


def _used(defect: Any, plan: Any, model: Any = cases.GPT2, step: int = 0, **more: Any) -> Row:
    """Wrong parameters are seen before the first layer uses them."""
    cause = "before the last step of the optimizer" if step else "shards|parts"
    more = {"layer": "embedding", "parameter": "embedding.*", "ranks": BOTH, "cause": cause} | more
    options = TWO_STEPS if step else ONE_STEP
    return _row(StepPhase.PARAMETERS, defect, plan, model, step=step, options=options, **more)


FIRST, BOTH = (0,), (0, 1)
SHARDING = (
    _row(
        StepPhase.INITIAL, initial_shards_exchanged, cases.CUT_PARAMETERS, ranks=BOTH, cause="another shard"
    ),
    _used(gathered_in_reverse, cases.CUT_PARAMETERS),
    # Initial values have no more digits than that.
    _used(gathered_in_single_precision, cases.CUT_PARAMETERS, cases.NARROW, step=1, cause="float32"),
    _used(shard_of_one_rank_stays_old, cases.CUT_STATE, step=1, ranks=FIRST),
    _used(gathered_once_and_for_all, cases.CUT_GRADIENTS, cases.LLAMA, step=1),
    _used(gathered_before_the_optimizer, cases.CUT_PARAMETERS, step=1),
    _used(
        gathered_over_replicate,
        cases.HYBRID_PARAMETERS,
        ranks=(0, 1, 2, 3),
        cause="of dim 0 differs",
        full=True,
    ),
    _used(shard_not_brought_back, cases.VISITING, cases.NARROW, step=1),
    _used(shard_not_sent_to_the_device, cases.CUT_STATE_AWAY, cases.LLAMA, step=1),
    _row(
        StepPhase.INPUT_GRADIENT,
        released_before_its_backward,
        cases.CUT_PARAMETERS,
        layer=cases.MLP,
        microbatch=0,
        ranks=FIRST,
        cause="own backward is not in it",
    ),
    _row(StepPhase.OPTIMIZER, wholes_are_stepped, cases.CUT_STATE, ranks=BOTH, cause="not updated"),
    _row(
        StepPhase.OPTIMIZER,
        flat_shards_do_not_decay,
        cases.CUT_PARAMETERS,
        cases.NARROW,
        parameter="blocks.0.mlp.down.weight",
        ranks=BOTH,
        cause="weight decay",
    ),
    _row(
        StepPhase.PARAMETERS,
        evaluated_on_parameters_of_the_step_before,
        cases.CUT_STATE,
        step=1,
        cause="as it was before the last step",
    ),
)
