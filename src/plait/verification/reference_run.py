"""The single device in plain PyTorch: layers, autograd, `torch.optim`. Nothing of the engine runs here.

Shared with the engine are what a model and a batch are made of (layers in order, rows of micro-batches,
initial values by name), the loss, and that a parameter that no loss depends on has a gradient of zero. Each
layer has aliases of its parameters, so that what each use of a tied parameter contributes to its gradient is
seen by itself. They share the memory of what the optimizer updates, or of a copy of it in another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from plait.autograd.dropout import DropoutGenerator, names_of
from plait.errors import ModelError, PlaitError
from plait.layers.evaluation_mode import evaluating
from plait.layers.layer_sequence import LayerSequence, NamedLayer, private_copy
from plait.layers.nested import Value, map_tensors, split, tensors_of
from plait.layers.precision import convert
from plait.models.initial import initial_value
from plait.tensor.losses import Loss
from plait.tensor.torch_losses import divisor
from plait.verification.formats import INITIAL_LOSS_SCALE, NumberFormats, ReferenceLossScale, epsilon_of
from plait.verification.location import WHOLE_STEP, RecordKey, Records, RecordScope
from plait.verification.options import VerifyOptions
from plait.verification.perturbation import Perturbation
from plait.verification.reference_recording import OF_LOSS, ReferenceRecording
from plait.verification.reference_update import ReferenceUpdate
from plait.verification.sketches import sketched
from plait.verification.start_values import ValueChange

Batch = tuple[Value, Value]
"""Inputs and targets of a global batch."""


class ReferenceRun:
    """One run on one device, recorded moment by moment."""

    def __init__(
        self,
        sequence: LayerSequence,
        loss: Loss,
        options: VerifyOptions,
        change: ValueChange,
        formats: NumberFormats,
        device: torch.device,
        perturbation: Perturbation,
        clip: float | None,
        *,
        baseline: ReferenceRecording | None = None,
        scale: float | None = None,
    ) -> None:
        """`clip`: the largest gradient norm, None: a third of the first step's.

        `baseline`: the recording of the undisturbed run. From its gradients and parameters this run goes on
        wherever it has recorded its own, so that a rounding error shows in what is computed next, and not in
        all that follows. `scale`: the first value of a dynamic loss scale.
        """
        self.loss = loss
        self.perturbation = perturbation
        self.formats = formats
        self.baseline = baseline
        built = materialise(sequence, options.seed, change, formats, device, apart=baseline is not None)
        self.parameters, self.copies, self.layers, self.uses = built
        self.dropout = DropoutGenerator(options.seed)
        self.dropout.attach_to(layer.module for layer in self.layers)
        if baseline is None:
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter.copy_(perturbation.perturb(parameter))
        self.model_parameters = sequence.parameters
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.updates = ReferenceUpdate(
            self.parameters, options, perturbation, clip, baseline, scale=self._scale(scale)
        )
        self.sums: dict[str, Tensor] = {}
        """Of the step under way, the gradients so far."""
        self.epsilon_of_loss = 0.0
        self.looks_inside = options.mode != "exact"

    @property
    def clip(self) -> float | None:
        """The bound of the norm in the first step, once that is done."""
        return self.updates.clip

    def epsilon(self, key: RecordKey) -> float:
        """The largest machine epsilon of what a recorded tensor was made of, other than its own dtype's."""
        if key.kind in OF_LOSS:
            return self.epsilon_of_loss
        if key.kind == "final":
            return self.formats.epsilon_of_gradient(self.model_parameters[key.name])
        if key.kind in ("norm", "largest"):  # squares are added up in float32, or in float64
            kinds = {parameter.dtype for parameter in self.trainable.values()} - {torch.float64}
            return epsilon_of(torch.float32) if kinds else 0.0
        return 0.0

    def run(self, batches: Sequence[Batch], microbatches: int) -> Iterator[tuple[RecordScope, Records]]:
        """Train on `batches`, each cut into `microbatches`; give each moment when it is done.

        The first, of step -1, is how the parameters start.
        """
        yield RecordScope(-1, WHOLE_STEP), self.updates.values()
        for step, (inputs, targets) in enumerate(batches):
            yield from self._step(step, inputs, targets, microbatches)
        inputs, targets = batches[-1]
        self._refresh()
        with evaluating(layer.module for layer in self.layers):
            mean = self._mean(inputs, targets)
        yield RecordScope(len(batches), WHOLE_STEP), {RecordKey("evaluation"): mean}

    def _scale(self, first: float | None) -> ReferenceLossScale:
        """The loss scale that the formats ask for."""
        if self.formats.loss_scale is not None:
            return ReferenceLossScale(self.formats.loss_scale)
        if any(map(self.formats.may_overflow, self.model_parameters.values())):
            return ReferenceLossScale(INITIAL_LOSS_SCALE if first is None else first, dynamic=True)
        return ReferenceLossScale()

    def _refresh(self) -> None:
        """Let layers use what the optimizer has made of the parameters."""
        with torch.no_grad():
            for name, copied in self.copies.items():
                copied.copy_(self.perturbation.perturb(self.parameters[name].to(copied.dtype)))
        for uses in self.uses:
            for name, alias in uses.items():
                if name not in self.copies:
                    alias.data = self.parameters[name].data  # an optimizer may have given it other memory

    def _step(
        self, step: int, inputs: Value, targets: Value, microbatches: int
    ) -> Iterator[tuple[RecordScope, Records]]:
        self.dropout.step = step
        self._refresh()
        whole = self._mean(inputs, targets)
        parts = split(targets, microbatches, "targets")
        given = split(inputs, microbatches, "inputs")
        rows = [len(next(tensors_of(one))) for one in given]
        self.dropout.rows = [range(*ends) for ends in pairwise(accumulate(rows, initial=0))]
        weight = torch.stack([torch.as_tensor(self.loss.weight(part)).double() for part in parts]).sum()
        weight = divisor(self.loss, weight)
        for name, parameter in self.trainable.items():
            kind = self.formats.gradient_of(self.model_parameters[name])
            self.sums[name] = torch.zeros_like(parameter, dtype=kind, requires_grad=False)
        totals = []
        for number, (part, wanted) in enumerate(zip(given, parts, strict=True)):
            records = self._microbatch(RecordScope(step, number), part, wanted, weight)
            totals.append(records[RecordKey("total")].double())
            yield RecordScope(step, number), records
        records = {RecordKey("mean"): torch.stack(totals).sum() / weight, RecordKey("whole"): whole}
        for name, parameter in self.trainable.items():
            parameter.grad = self._reduced(name).to(parameter.dtype)
        yield RecordScope(step, WHOLE_STEP), records | self.updates.update(step)

    def _reduced(self, name: str) -> Tensor:
        """The sum of a gradient, with the rounding errors of the dtype that it travels in."""
        total, travels = self.sums[name], self.formats.reduce_of(self.model_parameters[name])
        if self.baseline is None or epsilon_of(travels) <= epsilon_of(total.dtype):
            return total
        return self.perturbation.perturb_elementwise(total, epsilon_of(travels))

    def _microbatch(self, scope: RecordScope, inputs: Value, targets: Value, weight: Tensor) -> Records:
        records: Records = {}

        def boundary(value: Value, layer: int) -> Value:
            """Record what flows, and its gradient when that comes; go on with a copy that may be written."""
            numbers = iter(range(len(list(tensors_of(value)))))

            def pass_on(tensor: Tensor) -> Tensor:
                name = str(next(numbers))
                shaken = self.perturbation.perturb(tensor)
                records[RecordKey("output", layer, name)] = shaken.detach().clone()
                copied = shaken.clone()
                if copied.requires_grad:
                    copied.register_hook(partial(keep, RecordKey("gradient", layer, name)))  # type: ignore[no-untyped-call]
                return copied

            return map_tensors(pass_on, value)

        def keep(key: RecordKey, gradient: Tensor) -> Tensor:
            shaken = self.perturbation.perturb(gradient)
            records[key] = shaken.detach().clone()
            return shaken

        value = boundary(inputs, -1)
        for number, layer in enumerate(self.layers):
            looking = sketched(layer.module, wanted=self.looks_inside)
            with telling(layer.path or "the model"), drawing_nothing(layer.path), looking as inside:
                output = self._run(layer, scope.microbatch, value)
            records |= {RecordKey("inside", number, name): sketch for name, sketch in inside.items()}
            value = boundary(output, number)
        with telling("the loss"):
            total = self.loss.total(value, targets)
        self.epsilon_of_loss = torch.finfo(total.dtype).eps
        records[RecordKey("total")] = total.detach().clone()
        if total.requires_grad:
            torch.autograd.backward(total, (self.updates.scale.value / weight).to(total))
        return records | self._contributions(scope)

    def _contributions(self, scope: RecordScope) -> Records:
        """What each use of each parameter adds to its gradient."""
        records: Records = {}
        for number, uses in enumerate(self.uses):
            for name, alias in uses.items():
                if alias.grad is None:
                    continue
                key = RecordKey("contribution", number, name)
                records[key] = added = self.perturbation.perturb(alias.grad)
                alias.grad = None
                if self.baseline is not None:
                    added = self.baseline.values[scope][key]
                total = self.sums[name] + added.to(self.sums[name].dtype)
                self.sums[name] = (
                    total if self.baseline is None else self.perturbation.perturb_elementwise(total)
                )
        return records

    def _run(self, layer: NamedLayer, microbatch: int, value: Value) -> Value:
        with self.dropout.running(microbatch, layer.path, names_of(layer.module)):
            return layer.module(value)

    def _mean(self, inputs: Value, targets: Value) -> Tensor:
        """The loss of a batch that nobody cuts."""
        value = map_tensors(torch.clone, inputs)
        self.dropout.rows = [range(len(next(tensors_of(inputs))))]
        buffers = [(b, b.clone()) for layer in self.layers for b in layer.module.buffers()]
        with torch.no_grad():
            for layer in self.layers:
                with telling(layer.path or "the model"):
                    value = map_tensors(torch.clone, self._run(layer, 0, value))
            with telling("the loss"):
                total = self.loss.total(value, targets)
            for buffer, before in buffers:
                buffer.copy_(before)
        weight = torch.as_tensor(self.loss.weight(targets)).to(total.device)
        return total.double() / divisor(self.loss, weight)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """ModelError that says what failed on the single device already, with the first line of the error."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        told = (str(error).strip() or "no message").splitlines()[0]
        mixed = " (it keeps tensors of another dtype: try mode native)" if "dtype" in told else ""
        raise ModelError(f"{what} fails on a single device, {type(error).__name__}: {told}{mixed}") from error


@contextmanager
def drawing_nothing(path: str) -> Iterator[None]:
    """ModelError where a layer draws random numbers: other ones on every rank and in every run."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise ModelError(
            f"{path or 'the model'} draws random numbers, which depend on the layout and on who else draws: "
            "set what is drawn to a constant, and what is dropped to nothing, to verify the rest."
        )


Built = tuple[dict[str, nn.Parameter], dict[str, Tensor], list[NamedLayer], list[dict[str, nn.Parameter]]]


def materialise(
    sequence: LayerSequence,
    seed: int,
    change: ValueChange,
    formats: NumberFormats,
    device: torch.device,
    *,
    apart: bool,
) -> Built:
    """The parameters by name, copies of them for layers by name, the layers, each layer's aliases by name.

    Layers use the parameters' own memory where that has the dtype that they compute in, unless `apart`.
    """
    names = {id(parameter): name for name, parameter in sequence.parameters.items()}
    parameters: dict[str, nn.Parameter] = {}
    copies: dict[str, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    layers, uses = [], []
    for layer in sequence.layers:
        tensors: dict[int, Tensor] = {}
        aliases: dict[str, nn.Parameter] = {}
        for local, parameter in layer.module.named_parameters():
            name = names[id(parameter)]
            compute, master = formats.compute_of(parameter), formats.master_of(parameter)
            if name not in parameters:
                value = change(name, initial_value(layer.module, layer.path, local, seed))
                parameters[name] = nn.Parameter(convert(value, master, device), parameter.requires_grad)
                if apart or compute != master:
                    copies[name] = convert(parameters[name].detach(), compute, device)
            alias = nn.Parameter(copies.get(name, parameters[name].data), parameter.requires_grad)
            tensors[id(parameter)] = aliases[name] = alias
        for local, buffer in layer.module.named_buffers():
            if id(buffer) not in buffers:
                value = initial_value(layer.module, layer.path, local, seed)
                buffers[id(buffer)] = convert(value, formats.compute, device)
            tensors[id(buffer)] = buffers[id(buffer)]
        layers += private_copy([layer], tensors)
        uses.append({name: alias for name, alias in aliases.items() if alias.requires_grad})
    return parameters, copies, layers, uses
