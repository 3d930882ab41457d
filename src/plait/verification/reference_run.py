"""Training on a single device in plain PyTorch: layers, autograd, `torch.optim`; without the engine.

Shared with the engine are the model as a sequence of layers, the rows of micro-batches and the documents in
them, initial values by name, the loss, and the zero gradient of a parameter that the loss does not depend on.
Each layer has aliases of its parameters, so that each use of a tied parameter has a recorded contribution to
its gradient. Aliases share the memory of the parameters that the optimizer updates, or of copies of those in
another dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from plait.autograd.dropout import DropoutGenerator, names_of
from plait.autograd.running_sequence import ContextParallelism, running
from plait.engine.local_batch import local_inputs
from plait.errors import ModelError, PlaitError
from plait.layers.evaluation_mode import evaluating
from plait.layers.layer_sequence import LayerSequence, NamedLayer, private_copy
from plait.layers.nested import Value, map_tensors, split, tensors_of
from plait.layers.precision import convert
from plait.models.initial import initial_value
from plait.tensor.losses import Loss
from plait.tensor.torch_losses import divisor
from plait.verification.attention_mistakes import sums_after_mistakes
from plait.verification.definitions import Definitions
from plait.verification.definitions.documents import separated
from plait.verification.definitions.huggingface import FORWARDS as OF_HUGGINGFACE
from plait.verification.definitions.layers import FORWARDS as OF_PLAIT
from plait.verification.expected_dtypes import (
    INITIAL_LOSS_SCALE,
    NumberFormats,
    ReferenceLossScale,
    epsilon_of,
)
from plait.verification.location import RecordKey, Records, RecordScope
from plait.verification.narrowing_casts import NarrowingCasts
from plait.verification.options import VerifyOptions
from plait.verification.perturbation import Perturbation
from plait.verification.reference_recording import LOSS_KINDS, ReferenceRecording
from plait.verification.reference_update import ReferenceUpdate
from plait.verification.start_values import ValueChange
from plait.verification.tensor_sketches import sketched

Batch = tuple[Value, Value]
"""Inputs and targets of a global batch."""


class ReferenceRun:
    """One training run on one device, which yields the tensors of each micro-batch and of each step."""

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
        output_linear: str | None = None,
    ) -> None:
        """`clip`: the maximum gradient norm; None: a third of the first step's norm.

        `baseline`: the recording of the run without perturbation. If the options say `resynchronizes`, or the
        recording `narrowing`, gradients and parameters of this run (with `narrowing` also tensors between
        layers) are reset to it once they are recorded, so that a perturbation shows in the next tensors only. `scale`: the first value of a dynamic loss scale. `output_linear`: the
        name, in the last layer, of a linear whose input is recorded as the layer's output.
        """
        if baseline is not None and not (options.resynchronizes or baseline.narrowing):
            baseline = None
        self.loss = loss
        self.output_linear = output_linear
        self.perturbation = perturbation
        self.casts = NarrowingCasts(formats.compute if options.mode != "exact" else None, perturbation)
        self.formats = formats
        self.baseline = baseline
        built = build_layers(
            sequence, options.seed, change, formats, device, always_copy=baseline is not None
        )
        self.parameters, self.copies, self.layers, self.aliases = built
        self.dropout = DropoutGenerator(options.seed)
        self.dropout.attach_to(layer.module for layer in self.layers)
        self.definitions = Definitions()
        self.definitions.install((layer.module for layer in self.layers), {**OF_PLAIT, **OF_HUGGINGFACE})
        if baseline is None:
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter.copy_(perturbation.perturb(parameter))
        self.model_parameters = sequence.parameters
        self.update = ReferenceUpdate(
            self.parameters, options, perturbation, clip, baseline, scale=self._scale(scale)
        )
        self.ids: dict[RecordScope, Tensor] = {}
        """The document ids of each micro-batch that has some."""
        self.sums: dict[str, Tensor] = {}
        """The gradients of the current step so far."""
        self.epsilon_of_loss = 0.0
        self.resumed_steps = options.resumed_steps
        self.is_exact = options.mode == "exact"

    def epsilon(self, key: RecordKey) -> float:
        """Return the machine epsilon used for a loss, `final` gradient or norm; 0 for other tensors."""
        if key.kind in LOSS_KINDS:
            return self.epsilon_of_loss
        if key.kind == "final":
            return self.formats.epsilon_of_gradient(self.model_parameters[key.name])
        if key.kind in ("norm", "largest"):  # squares are added up in float32, or in float64
            kinds = {parameter.dtype for parameter in self.update.trainable.values()} - {torch.float64}
            return epsilon_of(torch.float32) if kinds else 0.0
        return 0.0

    def run(self, batches: Sequence[Batch], microbatches: int) -> Iterator[tuple[RecordScope, Records]]:
        """Train on `batches`, then evaluate; yield the recorded tensors of each micro-batch and of each step.

        The first scope, of step -1, has the initial parameters. A step after the candidate was loaded follows
        the evaluation.
        """
        yield RecordScope(-1), self.update.values()
        last = len(batches) - self.resumed_steps
        for step, (inputs, targets) in enumerate(batches[:last]):
            yield from self._step(step, inputs, targets, microbatches)
        if not self.is_exact:  # after a step in whole numbers, parameters are too large to go on
            yield from self._evaluation(last, *batches[last - 1], microbatches)
        for step, (inputs, targets) in enumerate(batches[last:], last):
            yield from self._step(step, inputs, targets, microbatches)

    def _evaluation(
        self, step: int, inputs: Value, targets: Value, microbatches: int
    ) -> Iterator[tuple[RecordScope, Records]]:
        """Evaluate a batch before `step`; yield the tensors of each micro-batch, and the mean loss."""
        self._update_aliases()
        total, weight = [], []
        with torch.no_grad(), evaluating(layer.module for layer in self.layers):
            parts = (split(value, microbatches, "batch") for value in (inputs, targets))
            for number, (part, of_targets) in enumerate(zip(*parts, strict=True)):
                scope = RecordScope(step, number, evaluated=True)
                records = self._microbatch(scope, part, of_targets, torch.ones(()))
                total.append(records[RecordKey("total")].double())
                weight.append(torch.as_tensor(self.loss.weight(of_targets)).double())
                yield scope, records
        mean = torch.stack(total).sum() / divisor(self.loss, torch.stack(weight).sum())
        yield RecordScope(step, evaluated=True), {RecordKey("evaluation"): mean}

    def _scale(self, first: float | None) -> ReferenceLossScale:
        if self.formats.scales_dynamically(self.model_parameters.values()):
            return ReferenceLossScale(INITIAL_LOSS_SCALE if first is None else first, dynamic=True)
        return ReferenceLossScale(self.formats.loss_scale or 1.0)

    def _update_aliases(self) -> None:
        with torch.no_grad():
            for name, copied in self.copies.items():
                copied.copy_(self.perturbation.perturb(self.parameters[name].to(copied.dtype)))
        for aliases in self.aliases:
            for name, alias in aliases.items():
                if name not in self.copies:
                    alias.data = self.parameters[name].data  # an optimizer may have replaced its memory

    def _step(
        self, step: int, inputs: Value, targets: Value, microbatches: int
    ) -> Iterator[tuple[RecordScope, Records]]:
        self.dropout.step = step
        self._update_aliases()
        whole = self._mean(inputs, targets)
        target_parts = split(targets, microbatches, "targets")
        input_parts = split(inputs, microbatches, "inputs")
        rows = [len(next(tensors_of(part))) for part in input_parts]
        self.dropout.rows = [range(*ends) for ends in pairwise(accumulate(rows, initial=0))]
        weight = torch.stack(
            [torch.as_tensor(self.loss.weight(part)).double() for part in target_parts]
        ).sum()
        weight = divisor(self.loss, weight)
        for name, parameter in self.update.trainable.items():
            kind = self.formats.gradient_of(self.model_parameters[name])
            self.sums[name] = torch.zeros_like(parameter, dtype=kind, requires_grad=False)
        totals = []
        for number, (part, of_targets) in enumerate(zip(input_parts, target_parts, strict=True)):
            records = self._microbatch(RecordScope(step, number), part, of_targets, weight)
            totals.append(records[RecordKey("total")].double())
            yield RecordScope(step, number), records
        records = {RecordKey("mean"): torch.stack(totals).sum() / weight, RecordKey("whole"): whole}
        for name, parameter in self.update.trainable.items():
            parameter.grad = self._reduced(name).to(parameter.dtype)
        yield RecordScope(step), records | self.update.apply(step)

    def _reduced(self, name: str) -> Tensor:
        """Return a parameter's summed gradient; a perturbed run adds the rounding error of its reduction."""
        total, sent = self.sums[name], self.formats.reduce_of(self.model_parameters[name])
        if self.baseline is None or epsilon_of(sent) <= epsilon_of(total.dtype):
            return total
        return self.perturbation.perturb_elementwise(total, epsilon_of(sent))

    def _microbatch(self, scope: RecordScope, inputs: Value, targets: Value, weight: Tensor) -> Records:
        """Run a micro-batch, backward too unless gradients are off, and return its tensors."""
        value, ids = separated(inputs)
        if ids is not None:
            self.ids[scope] = ids
        with self._running(inputs), self.definitions.running(ids):
            return self._run_layers(scope, value, targets, weight)

    @contextmanager
    def _running(self, inputs: Value) -> Iterator[None]:
        """Context: layers that are no definitions work on the whole sequences of `inputs`, which are checked."""
        (sequence,) = local_inputs([inputs], ContextParallelism.of_one_rank()).sequences
        with running(sequence):
            yield

    def _run_layers(self, scope: RecordScope, inputs: Value, targets: Value, weight: Tensor) -> Records:
        records: Records = {}

        def boundary(value: Value, layer: int) -> Value:
            """Record a value and, during backward, its gradient; return a copy that may be written to."""
            numbers = iter(range(len(list(tensors_of(value)))))

            def record_and_copy(tensor: Tensor) -> Tensor:
                name = str(next(numbers))
                perturbed = self.perturbation.perturb(tensor)
                records[RecordKey("output", layer, name)] = perturbed.detach().clone()
                copied = perturbed.clone()
                self._reset(copied, scope, RecordKey("output", layer, name))
                if copied.requires_grad:
                    copied.register_hook(partial(record_gradient, RecordKey("gradient", layer, name)))  # type: ignore[no-untyped-call]
                return copied

            return map_tensors(record_and_copy, value)

        def record_gradient(key: RecordKey, gradient: Tensor) -> Tensor:
            perturbed = self.perturbation.perturb(gradient)
            records[key] = perturbed.detach().clone()
            self._reset(perturbed, scope, key)
            return perturbed

        value, last = boundary(inputs, -1), len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            linear = self.output_linear if number == last else None
            recording = sketched(layer.module, wanted=not self.is_exact)
            features = _input_replaced(layer.module, linear, lambda given: boundary(given, last))
            failing = failure_named(layer.path or "the model")
            with failing, random_refused(layer.path), recording as found, features:
                self.definitions.windows.clear()
                output = self._run(layer, scope.microbatch, value)
            records |= {RecordKey("inside", number, name): sketch for name, sketch in found.items()}
            if not self.is_exact and not self.perturbation.number:
                run = partial(self._run, layer, scope.microbatch)
                others = self._other_documents(scope)
                records |= sums_after_mistakes(self.definitions, run, value, number, others)
            if linear is None:
                value = boundary(output, number)
            else:
                value = output
                records[RecordKey("logits", number)] = value.detach().clone()
        with failure_named("the loss"):
            with self.casts:
                total = self.loss.total(value, targets)
        self.epsilon_of_loss = torch.finfo(total.dtype).eps
        records[RecordKey("total")] = total.detach().clone()
        if total.requires_grad:
            with self.casts:
                torch.autograd.backward(total, (self.update.scale.value / weight).to(total))
        return records | self._contributions(scope)

    def _reset(self, tensor: Tensor, scope: RecordScope, key: RecordKey) -> None:
        """Replace the value of a tensor between layers by the baseline's with rounding errors, if there is one."""
        if self.baseline is not None and self.baseline.narrowing:
            tensor.data = self.perturbation.perturb(self.baseline.values[scope][key].clone())

    def _other_documents(self, scope: RecordScope) -> dict[str, Tensor]:
        """Return document ids that a micro-batch may have by mistake: the last one's, those of the step before."""
        others = {}
        last = self.ids.get(scope._replace(microbatch=scope.microbatch - 1))
        if last is not None:
            others[f"micro-batch {scope.microbatch - 1}"] = last
        for (step, microbatch, evaluated), ids in self.ids.items():
            if step == scope.step - 1 and not evaluated:
                others[f"micro-batch {microbatch} of the step before"] = ids
        return others

    def _contributions(self, scope: RecordScope) -> Records:
        """Return each layer's contribution to a parameter's gradient, and add it to the gradient's sum."""
        records: Records = {}
        for number, aliases in enumerate(self.aliases):
            for name, alias in aliases.items():
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
        with self.dropout.running(microbatch, layer.path, names_of(layer.module)), self.casts:
            return layer.module(value)

    def _mean(self, inputs: Value, targets: Value) -> Tensor:
        """Return the mean loss of a whole batch, without gradients and without changing buffers."""
        given, ids = separated(inputs)
        value = map_tensors(torch.clone, given)
        self.dropout.rows = [range(len(next(tensors_of(inputs))))]
        buffers = [(b, b.clone()) for layer in self.layers for b in layer.module.buffers()]
        with torch.no_grad(), self._running(inputs), self.definitions.running(ids):
            for layer in self.layers:
                with failure_named(layer.path or "the model"):
                    value = map_tensors(torch.clone, self._run(layer, 0, value))
            with failure_named("the loss"):
                total = self.loss.total(value, targets)
            for buffer, before in buffers:
                buffer.copy_(before)
        weight = torch.as_tensor(self.loss.weight(targets)).to(total.device)
        return total.double() / divisor(self.loss, weight)


@contextmanager
def _input_replaced(layer: nn.Module, name: str | None, replace: Callable[[Value], Value]) -> Iterator[None]:
    """Context: the module `name` of a layer is given what `replace` makes of its input; None: no module."""
    if name is None:
        yield
        return
    module = layer.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, given: tuple(map(replace, given)))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def failure_named(what: str) -> Iterator[None]:
    """Context: convert an error to a ModelError, which says that `what` fails on a single device already."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        message = (str(error).strip() or "no message").splitlines()[0]
        mixed = " (it keeps tensors of another dtype: try mode native)" if "dtype" in message else ""
        raise ModelError(
            f"{what} fails on a single device, {type(error).__name__}: {message}{mixed}"
        ) from error


@contextmanager
def random_refused(path: str) -> Iterator[None]:
    """Context: raise ModelError if a layer draws random numbers, which differ between ranks and runs."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise ModelError(
            f"{path or 'the model'} draws random numbers, which depend on the layout and on other draws: "
            "replace them by constants, and set dropout to 0, to verify the rest."
        )


BuiltLayers = tuple[
    dict[str, nn.Parameter], dict[str, Tensor], list[NamedLayer], list[dict[str, nn.Parameter]]
]


def build_layers(
    sequence: LayerSequence,
    seed: int,
    change: ValueChange,
    formats: NumberFormats,
    device: torch.device,
    *,
    always_copy: bool,
) -> BuiltLayers:
    """Return a run's parameters, their copies in another dtype, the layers, and each layer's leaf tensors.

    Aliases are a layer's own leaf tensors for its parameters, with gradients of their own. Layers use
    the parameters' own memory where that has their compute dtype, unless `always_copy`.
    """
    names = {id(parameter): name for name, parameter in sequence.parameters.items()}
    parameters: dict[str, nn.Parameter] = {}
    copies: dict[str, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    layers, aliases_of_layers = [], []
    for layer in sequence.layers:
        tensors: dict[int, Tensor] = {}
        aliases: dict[str, nn.Parameter] = {}
        for local, parameter in layer.module.named_parameters():
            name = names[id(parameter)]
            compute, master = formats.compute_of(parameter), formats.master_of(parameter)
            if name not in parameters:
                value = change(name, initial_value(layer.module, layer.path, local, seed))
                parameters[name] = nn.Parameter(convert(value, master, device), parameter.requires_grad)
                if always_copy or compute != master:
                    copies[name] = convert(parameters[name].detach(), compute, device)
            alias = nn.Parameter(copies.get(name, parameters[name].data), parameter.requires_grad)
            tensors[id(parameter)] = aliases[name] = alias
        for local, buffer in layer.module.named_buffers():
            if id(buffer) not in buffers:
                value = initial_value(layer.module, layer.path, local, seed)
                buffers[id(buffer)] = convert(value, formats.compute, device)
            tensors[id(buffer)] = buffers[id(buffer)]
        layers += private_copy([layer], tensors)
        aliases_of_layers.append({name: alias for name, alias in aliases.items() if alias.requires_grad})
    return parameters, copies, layers, aliases_of_layers
