"""Comparison of a plan's run with an independent model: outputs, loss and gradients of each batch.

rank 0       the reference; gradients of all parameters are compared here, and where outputs differ modules
all ranks    the plan's run from the same values; each rank compares its rows of the output
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from plait.engine.engine import Engine
from plait.engine.local_batch import local_inputs
from plait.engine.parallelize import parallelize
from plait.errors import DataError, PlaitError
from plait.models.layers.layer_sequence import saved_tensors
from plait.plan.plan import Plan
from plait.ranks.collectives import broadcast
from plait.ranks.mesh import Mesh
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.router import Router
from plait.tensor.microbatches import split
from plait.tensor.nested_values import Value, list_of_tensors, map_tensors
from plait.tensor.running_sequence import ContextParallelism, running
from plait.verification.case import Case
from plait.verification.independent_model_report import Compared, IndependentReport
from plait.verification.independent_reference import (
    Expected,
    Float64Mode,
    IndependentReference,
    ReferenceSide,
)
from plait.verification.reference.recording import (
    broadcast_object,
    elementwise_difference,
    largest_difference,
    largest_magnitude,
)
from plait.verification.reference.start_values import add_offsets, unchanged, with_values

COMPILED = 1e-5
"""Relative difference that compiled layers may have, whose casts to float32 are not seen."""
SAME_VALUE = 1e-6
"""Relative difference up to which an initial value is that of the reference: that of float32."""
CLOSE = 1e-6
"""Relative difference below which a module's tensors count as equal: a mistake is larger."""
ALIKE_ON_ONE_RANK = (
    "plait's layers on one rank give what the reference gives, so the plan makes the difference: verify it "
    "without a reference."
)


def compare(
    batch: int, what: str, name: str, actual: Tensor, expected: Tensor, allowed: float, size: float = 0.0
) -> Compared:
    """Return how `actual` differs from `expected`. Raises DataError for another shape."""
    if actual.shape != expected.shape:
        raise DataError(
            f"the {what}{name and f' of {name}'} has the shape {list(actual.shape)}, and that of the "
            f"reference {list(expected.shape)}: give one that returns what the model returns for them."
        )
    size = max(size, largest_magnitude(expected))
    if not actual.numel():
        return Compared(batch, what, name, 0.0, size, allowed, (), (0.0, 0.0))
    difference = elementwise_difference(actual, expected)
    worst = difference.argmax()
    index = tuple(int(one) for one in torch.unravel_index(worst, actual.shape))
    values = float(actual.reshape(-1)[worst]), float(expected.reshape(-1)[worst])
    return Compared(batch, what, name, float(difference.max()), size, allowed, index, values)


def compare_with_reference(case: Case, plan: Plan, reference: IndependentReference) -> IndependentReport:
    """Return this rank's report: `plan` compared with an independent model on each batch of `case`.

    Communication: that of the training, all parameters once, and the reference's outputs and loss.
    """
    begun = perf_counter()
    with closing(case.mesh(plan)) as mesh:
        plan = replace(case.options.applied_to(plan), linears=None)  # which the reference knows nothing of
        model = _as_compared(case.build())
        engine = parallelize(model, plan, mesh, case.loss, rules=case.rules_of(model), seed=case.options.seed)
        run = PlanSide(case, model, engine, reference)
        found = run.unlike
        mode: AbstractContextManager[Any] = nullcontext() if plan.compile else Float64Mode()
        with mode:
            for number in range(len(case.batches)):
                found += run.compare(number)
        seconds = perf_counter() - begun
        return IndependentReport(reference.name, plan, tuple(found), run.unmatched, run.place, seconds)


def _as_compared(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode, without the losses that its routers add; a copy, if it changes.

    The loss of the reference is that of its outputs alone.
    """
    routers = [one for one in model.modules() if isinstance(one, Router)]
    if not routers and not any(one.training for one in model.modules()):
        return model
    compared = copy.deepcopy(model).eval()
    for router in compared.modules():
        if isinstance(router, Router):
            router.balance = Balance()
    return compared


class PlanSide:
    """One rank of the plan's run, to be compared with an independent reference model on rank 0."""

    def __init__(self, case: Case, model: nn.Module, engine: Engine, reference: IndependentReference) -> None:
        self.case, self.model, self.engine, self.mesh = case, model, engine, engine.mesh
        self.unlike: list[Compared] = []
        self.place, self.unmatched = "", 0
        self.reference: ReferenceSide | None = None
        self.state = engine.state_dict()
        with _on_rank_zero(self.mesh) as here:
            if here:
                self.reference = self._reference(reference)
        engine.load_state_dict(self.state or None, broadcast=True)

    def _reference(self, given: IndependentReference) -> ReferenceSide:
        """Return the reference with the values of the plan's run, which are changed a little in both."""
        built = ReferenceSide(self.case.loss, given, self.model, self.mesh.device)
        if self.engine.plan.compile:
            built.accuracy = max(built.accuracy, COMPILED)
        if any(not one.is_meta for one in self.model.parameters()):
            self.unlike = [one for one in self._initial_values(built) if not one.equal]
        if built.matches_all():
            change, aliases = add_offsets(self.case.options.seed), self.engine.aliases
            matched = {name for pair, _ in built.matched for name in pair.ours}
            for name in matched:
                self.state[name] = change(name, self.state[name])
            self.state |= {alias: self.state[name] for alias, name in aliases.items() if name in matched}
        built.set_values(self.state)
        return built

    def _initial_values(self, reference: ReferenceSide) -> Iterator[Compared]:
        for pair, own in reference.matched:
            if not own.is_meta:
                found = pair.joined([self.state[name] for name in pair.ours]).to(own.device)
                allowed = SAME_VALUE * largest_magnitude(own)
                yield compare(0, "initial values", pair.theirs, found, own.detach(), allowed)

    def compare(self, number: int) -> Iterator[Compared]:
        """Yield this rank's comparisons of output, loss and gradients of a batch; all ranks must call it."""
        device, dp = self.mesh.device, self.mesh.size("dp")
        inputs, targets = self.case.batches[number]
        targets = map_tensors(lambda one: one.to(device), targets)
        inputs = map_tensors(
            lambda one: one.to(device, torch.float64 if one.is_floating_point() else None), inputs
        )
        expected: Expected | None = None
        with _on_rank_zero(self.mesh) as here:
            if here:
                assert self.reference is not None
                expected = self.reference.run((inputs, targets))
        sent = self._sent(expected)
        mine = self.mesh.index("dp")
        rows, row_targets = split(inputs, dp, "batch")[mine], split(targets, dp, "batch")[mine]

        def one(what: str, place: int, actual: Tensor) -> Compared:
            whole, allowed = sent[f"{what} {place}"]
            return compare(number, what, "", actual, whole.chunk(dp)[mine], allowed)

        outputs = [one("output", place, tensor) for place, tensor in enumerate(self._outputs(rows, sent))]
        yield from outputs
        if self.reference is not None and not all(each.equal for each in outputs) and not self.place:
            self.place = first_differing_module(self.model, self.state, self.reference, inputs)
        floating = any(tensor.is_floating_point() for tensor in list_of_tensors(rows))
        loss = self.engine.forward_backward(rows, row_targets, input_gradients=floating)
        yield compare(number, "loss", "", loss, *sent["loss"])
        yield from self._gradients(number, expected)
        given = self.engine.input_gradients() if floating else None
        given = [] if given is None else [each for each in list_of_tensors(given) if each is not None]
        yield from (one("input gradient", place, tensor) for place, tensor in enumerate(given))
        for parameter in self.engine.parameters():
            parameter.grad = None

    def _outputs(self, rows: Value, sent: Mapping[str, Any]) -> list[Tensor]:
        found = list_of_tensors(self.engine.output(rows))
        wanted = sum(name.startswith("output ") for name in sent)
        if len(found) != wanted:
            raise DataError(
                f"the model gives {len(found)} tensors, and the reference {wanted}: give one that returns "
                "what the model returns."
            )
        return found

    def _gradients(self, number: int, expected: Expected | None) -> Iterator[Compared]:
        """Yield, on rank 0, the comparisons of parameters' gradients, the last layer's first."""
        found = {name: gradient.detach() for name, gradient in self.engine.named_gradients()}
        if expected is None or self.reference is None:
            return
        least, without = expected.smallest_size(), set(found)
        for pair, _ in reversed(self.reference.matched):
            if pair.theirs not in expected.gradients or not all(name in found for name in pair.ours):
                continue
            wanted = expected.gradients[pair.theirs]
            size = max(least, largest_magnitude(wanted))
            actual = pair.joined([found[name] for name in pair.ours])
            allowed = expected.allowed(f"gradient {pair.theirs}", size)
            without -= {*pair.ours}
            yield compare(number, "gradient", pair.theirs, actual, wanted, allowed, size)
        self.unmatched = len(without)

    def _sent(self, expected: Expected | None) -> dict[str, tuple[Tensor, float]]:
        """Return the tensors that all ranks compare, by name, with tolerances, as rank 0 has them."""
        tensors = {} if expected is None else dict(expected.named())
        tensors = {name: one for name, one in tensors.items() if not name.startswith("gradient ")}
        table = [
            (name, tuple(one.shape), one.dtype, expected.allowed(name, largest_magnitude(one)))
            for name, one in tensors.items()
            if expected is not None
        ]
        found: dict[str, tuple[Tensor, float]] = {}
        for name, shape, dtype, allowed in broadcast_object(table if tensors else None, self.mesh):
            own = tensors.get(name, torch.empty(shape, dtype=dtype, device=self.mesh.device))
            whole = broadcast(own.contiguous(), self.mesh.group("world"), checked=False).wait()
            found[name] = whole, allowed
        return found


@contextmanager
def _on_rank_zero(mesh: Mesh) -> Iterator[bool]:
    """Context: yield whether this is rank 0; an error of plait that it raises is raised on every rank."""
    error: PlaitError | None = None
    try:
        yield mesh.rank == 0
    except PlaitError as raised:
        error = raised
    error = broadcast_object(error, mesh)
    if error is not None:
        raise error


def first_differing_module(
    model: nn.Module, state: Mapping[str, Tensor], reference: ReferenceSide, inputs: Value
) -> str:
    """Return a sentence about the first module that differs on one rank, in the order of `model`'s layers.

    `state`: the values of both. Compares modules that both have, by the names of their parameters, on the
    inputs of a whole batch. Returns "" if outputs differ and no such module could be compared.
    """
    local = with_values(model, 0, unchanged, unchanged).double().eval()
    with torch.no_grad():
        for name, tensor in saved_tensors(local).items():
            tensor.copy_(state[name])
    device = next(iter(list_of_tensors(inputs))).device
    whole = local_inputs([inputs], ContextParallelism.of_one_rank())
    pairs = [pair for pair, _ in reference.matched if len(pair.ours) == 1]
    paths = {pair.ours[0].rpartition(".")[0]: pair.theirs.rpartition(".")[0] for pair in pairs}
    with torch.no_grad(), _first_calls(local.to(device), paths) as ours, running(whole.sequences[0]):
        output = local(whole.values[0])
    with torch.no_grad(), _first_calls(reference.module, paths.values()) as theirs:
        expected = reference.call(reference.module, inputs)
    before: list[str] = []
    for path, own in ours.items():
        name, other = paths[path], theirs.get(paths[path], (None, None))
        if not all(map(_are_comparable, own, other)):
            continue
        given_alike, gives_alike = map(_are_close, own, other)
        if not given_alike:
            equal = f", where {' and '.join(before[-3:])} give the same" if before else ""
            return f"on one rank {name} is given something else{equal}: look at what is computed before it."
        if not gives_alike:
            return f"on one rank {name} gives something else for the same input."
        before.append(name)
    if all(map(_are_close, list_of_tensors(output), list_of_tensors(expected))):
        return ALIKE_ON_ONE_RANK
    if before:
        return f"on one rank all modules that both have give the same: look at what follows {before[-1]}."
    return ""


@contextmanager
def _first_calls(model: Any, paths: Iterable[str]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Context: yield by path the first argument and the output of each module's first call, in order."""
    calls: dict[str, tuple[Any, Any]] = {}

    def record(path: str, _: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        calls.setdefault(path, (given[0] if given else None, output))

    handles = [
        model.get_submodule(path).register_forward_hook(partial(record, path))
        for path in dict.fromkeys(paths)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _are_comparable(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and largest_difference(one, other) <= CLOSE * largest_magnitude(other)
