"""Training on a single device in plain PyTorch: layers, autograd, `torch.optim`; without the engine.

Attention, positions, documents, rotary angles, dropout, and all layers of plait's own models and around
modules of transformers are computed by definition (`definitions`). Shared with the engine are the user's
layers and the modules of torch and transformers, a model as a sequence of layers, the rows of micro-batches,
the masks of dropout, initial values by name, the loss, and the zero gradient of a parameter that it does not
depend on.

Each layer has aliases of its parameters, so that each use of a tied parameter has a recorded contribution to
its gradient. Aliases share the memory of the parameters that the optimizer updates, or of copies of those in
another dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from plait.engine.local_batch import local_inputs
from plait.models.layers.layer_sequence import LayerSequence, evaluating, own_numbers
from plait.plan.rules import Rules
from plait.tensor.dropout import DropoutGenerator, names_of
from plait.tensor.losses import Loss
from plait.tensor.microbatches import split
from plait.tensor.named_layer import NamedLayer
from plait.tensor.nested_values import Value, map_tensors, tensors_of
from plait.tensor.running_sequence import ContextParallelism, running
from plait.tensor.torch_losses import divisor
from plait.verification.definitions.attention_and_dropout import Definitions, separated
from plait.verification.definitions.experts import FORWARDS as OF_EXPERTS
from plait.verification.definitions.float8_experts import experts_in_float8, quantise_experts
from plait.verification.definitions.float8_linear_selection import linears_in_float8, quantise_linears
from plait.verification.definitions.huggingface import FORWARDS as OF_HUGGINGFACE
from plait.verification.definitions.layers import FORWARDS as OF_PLAIT
from plait.verification.definitions.router_call_recorder import RouterCall
from plait.verification.expected_dtypes import (
    INITIAL_LOSS_SCALE,
    NumberFormats,
    ReferenceLossScale,
    epsilon_of,
)
from plait.verification.options import VerifyOptions
from plait.verification.reference.differences_within_layers import ModuleSketches
from plait.verification.reference.recorded_routing import MARGIN, experts_in, records_of
from plait.verification.reference.recording import LOSS_KINDS, ReferenceRecording
from plait.verification.reference.reference_layers import (
    build_layers,
    failure_named,
    input_replaced,
    random_refused,
    require_function_of_output,
    require_no_hidden_input,
    require_values,
)
from plait.verification.reference.reference_update import ReferenceUpdate
from plait.verification.reference.rounding_errors import NarrowingCasts, Perturbation
from plait.verification.reference.router_losses import OF_ROUTERS, RouterLosses
from plait.verification.reference.start_values import ValueChange
from plait.verification.reference.values_after_mistakes import other_documents, sums_after_mistakes
from plait.verification.reference.whole_optimizer import whole_optimizer
from plait.verification.step_location import SCALE, RecordKey, Records, RecordScope


@dataclass(frozen=True)
class HeldState:
    """A model's buffers and number attributes at some time, to be restored later."""

    buffers: tuple[tuple[nn.Module, str, Tensor], ...]
    numbers: tuple[tuple[nn.Module, dict[str, int | float]], ...]

    @staticmethod
    def of(layers: Iterable[NamedLayer]) -> HeldState:
        """Return the current buffers and number attributes of `layers`; the buffers are not copied."""
        modules = [module for layer in layers for module in layer.module.modules()]
        return HeldState(
            tuple(
                (one, name, buffer) for one in modules for name, buffer in one.named_buffers(recurse=False)
            ),
            tuple((one, own_numbers(one)) for one in modules),
        )

    def set_back(self, *, to_copies: bool = False) -> None:
        """Restore the numbers and the buffers (`to_copies`: to copies of them); shared ones stay shared."""
        values = {id(one): one.clone() if to_copies else one for _, _, one in self.buffers}
        for module, name, buffer in self.buffers:
            setattr(module, name, values[id(buffer)])
        for module, numbers in self.numbers:
            for name in own_numbers(module).keys() - numbers.keys():
                delattr(module, name)
            for name, number in numbers.items():
                setattr(module, name, number)


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
        rules: Rules | None = None,
        linears: str | None = None,
    ) -> None:
        """`clip`: the maximum gradient norm; None: a third of the first step's norm.

        `baseline`: the recording of the run without perturbation. If the options say `resynchronizes`, or it
        is `narrowing`, gradients and parameters of this run, and if `narrowing` tensors between layers, are
        reset to it once they are recorded, so that a perturbation shows in the next tensors only. Tokens go
        to the experts that it has recorded. `scale`: the first value of a dynamic loss scale.
        `output_linear`: that, in the last layer, of a linear whose input is recorded as the layer's output.
        `rules`: those of tensor parallelism, which declare the matrices of joined linears. `linears`: the
        float8 recipe of the plan.
        """
        self.routed = baseline  # whose experts tokens go to
        if baseline is not None and not (options.resynchronizes or baseline.narrowing):
            baseline = None
        self.loss, self.output_linear = loss, output_linear
        self.perturbation = perturbation
        self.casts = NarrowingCasts(formats.compute if options.mode != "exact" else None, perturbation)
        self.formats = formats
        self.baseline = baseline
        self.parameters, self.copies, self.layers, self.aliases = build_layers(
            sequence, options.seed, change, formats, device, always_copy=baseline is not None
        )
        self.dropout = DropoutGenerator(options.seed)
        self.dropout.attach_to(layer.module for layer in self.layers)
        compute = formats.compute
        self.definitions = Definitions(keeps_near=compute is not None and compute.itemsize <= 2)
        self._install_definitions(sequence, rules, linears)
        if baseline is None:
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter.copy_(perturbation.perturb(parameter))
        self.model_parameters = sequence.parameters
        run = options, perturbation, clip, baseline
        make = partial(whole_optimizer, options.make_optimizer, sequence=sequence, rules=rules)
        self.update = ReferenceUpdate(self.parameters, *run, scale=self._scale(scale), make=make)
        self.ids: dict[RecordScope, Tensor] = {}
        """The document ids of each micro-batch that has some."""
        self.sums: dict[str, Tensor] = {}
        """The gradients of the current step so far."""
        self.router_losses = RouterLosses(self.layers)
        self.chosen: list[list[Tensor]] = []
        """By layer, the experts `[rows, positions, k]` of the step's batch, a tensor for each call."""
        self.epsilon_of_loss, self.resumed_steps = 0.0, options.resumed_steps
        self.is_exact = options.mode == "exact"

    def _install_definitions(self, sequence: LayerSequence, rules: Rules | None, linears: str | None) -> None:
        """Make layers compute by their definitions, and linears and experts by a float8 recipe, if any."""
        forwards = {**OF_PLAIT, **OF_HUGGINGFACE, **OF_EXPERTS}
        self.definitions.install((layer.module for layer in self.layers), forwards)
        if linears is not None:
            paths = linears_in_float8(sequence.layers, rules or {})
            quantise_linears(self.definitions, self.layers, paths, linears, self.casts.unnoted)
            of_experts = experts_in_float8(sequence.layers)
            quantise_experts(self.definitions, self.layers, of_experts, self.casts.unnoted)

    def epsilon(self, key: RecordKey) -> float:
        """Return the machine epsilon for a loss, routing margin, `final` gradient or norm; else 0."""
        if key.kind in LOSS_KINDS:
            return self.epsilon_of_loss
        if key.kind == MARGIN and self.formats.compute is not None:
            return epsilon_of(self.formats.compute)
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
        totals, before = [], HeldState.of(self.layers)
        input_parts, target_parts = (split(value, microbatches, "batch") for value in (inputs, targets))
        with torch.no_grad(), evaluating(layer.module for layer in self.layers):
            for number, (part, of_targets) in enumerate(zip(input_parts, target_parts, strict=True)):
                scope = RecordScope(step, number, evaluated=True)
                before.set_back(to_copies=True)
                records = self._microbatch(scope, part, of_targets, torch.ones(()))
                totals.append(records[RecordKey("total")].double())
                yield scope, records
        before.set_back()
        mean = torch.stack(totals).sum() / self._divisor(target_parts)
        yield RecordScope(step, evaluated=True), {RecordKey("evaluation"): mean}

    def _divisor(self, targets: Iterable[Value]) -> Tensor:
        """Return the number by which the summed loss of all these targets is divided."""
        weights = [torch.as_tensor(self.loss.weight(part)).double() for part in targets]
        return divisor(self.loss, torch.stack(weights).sum())

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
        whole = self._mean(step, inputs, targets, microbatches)
        target_parts = split(targets, microbatches, "targets")
        input_parts = split(inputs, microbatches, "inputs")
        rows = [len(next(tensors_of(part))) for part in input_parts]
        self.dropout.rows = [range(*ends) for ends in pairwise(accumulate(rows, initial=0))]
        weight = self._divisor(target_parts)
        for name, parameter in self.update.trainable.items():
            kind = self.formats.gradient_of(self.model_parameters[name])
            self.sums[name] = torch.zeros_like(parameter, dtype=kind, requires_grad=False)
        totals, before = [], HeldState.of(self.layers)
        for number, (part, of_targets) in enumerate(zip(input_parts, target_parts, strict=True)):
            before.set_back(to_copies=True)  # what changes in each run changes once a step
            records = self._microbatch(RecordScope(step, number), part, of_targets, weight)
            totals.append(records[RecordKey("total")].double())
            yield RecordScope(step, number), records
        records = {RecordKey("mean"): torch.stack(totals).sum() / weight, RecordKey("whole"): whole}
        records |= self.router_losses.records() | self.router_losses.correct()
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
        with self._running(inputs) as (value, ids):
            if ids is not None:
                self.ids[scope] = ids
            return self._run_layers(scope, value, targets, weight)

    @contextmanager
    def _running(self, inputs: Value, microbatches: int = 1) -> Iterator[tuple[Value, Tensor | None]]:
        """Context: layers run by definition, on whole sequences; yield their input and document ids."""
        value, ids = separated(inputs)
        self.definitions.microbatches_at_once = microbatches
        self.definitions.scales.begin()
        (sequence,) = local_inputs([inputs], ContextParallelism.of_one_rank()).sequences
        with running(sequence), self.definitions.running(ids):
            yield value, ids

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

        is_first = scope == RecordScope(0, 0) and not self.perturbation.number
        calls, sources = list[RouterCall](), list[tuple[int, Value]]()
        value, last = boundary(inputs, -1), len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            linear = self.output_linear if number == last else None
            recording = nullcontext() if self.is_exact else closing(ModuleSketches(layer.module))
            features = input_replaced(layer.module, linear, lambda given: boundary(given, last))
            failing = failure_named(layer.path or "the model")
            with failing, random_refused(layer.path), recording as sketches, features:
                self.definitions.windows.clear()
                self.definitions.routing.begin(self._chosen(scope, number))
                given = [tensor.grad_fn for tensor in tensors_of(value) if tensor.grad_fn is not None]
                output = self._run(layer, scope.microbatch, value)
            if is_first:
                own = self.aliases[number].values()
                require_no_hidden_input(layer.path or "the model", output, given, own)
            calls += self.definitions.routing.calls
            sources += [(number, value)] * len(self.definitions.routing.calls)
            records |= records_of(layer.module, number, self.definitions.routing.calls, value)
            found = {} if sketches is None else sketches.found
            records |= {RecordKey("inside", number, name): sketch for name, sketch in found.items()}
            records |= self._after_mistakes(scope, layer, number, value)
            if linear is None:
                value = boundary(output, number)
            else:
                value = output
                records[RecordKey("logits", number)] = value.detach().clone()
        total = self._total(value, targets, checked=is_first)
        records[RecordKey("total")] = total.detach().clone()
        if total.requires_grad:
            added = self.router_losses.losses(calls, self.ids.get(scope), len(next(tensors_of(inputs))))
            records |= self._of_routers(sources, added)
            self._backward(total, weight, [one for one in added if one.requires_grad])
        return records | self._scales() | self._contributions(scope)

    def _scales(self) -> Records:
        """Return the scales of the operands of linears in float8 in a micro-batch."""
        return {RecordKey(SCALE, name=name): unit for name, unit in self.definitions.scales.found.items()}

    def _after_mistakes(self, scope: RecordScope, layer: NamedLayer, number: int, value: Value) -> Records:
        """Return sums of a layer's output after common mistakes; none in exact and perturbed runs."""
        if self.is_exact or self.perturbation.number:
            return {}
        run, others = partial(self._run, layer, scope.microbatch), other_documents(self.ids, scope)
        self.definitions.routing.begin()
        return sums_after_mistakes(self.definitions, run, value, number, others)

    def _of_routers(self, sources: Sequence[tuple[int, Value]], losses: Sequence[Tensor]) -> Records:
        """Return the gradients that the `losses` of routers add to the inputs of their own layers."""
        records: Records = {}
        for (number, given), loss in zip(sources, losses, strict=bool(losses)):
            tensor = next(tensors_of(given))
            if loss.requires_grad and tensor.requires_grad:
                (own,) = torch.autograd.grad(loss, tensor, retain_graph=True, allow_unused=True)
                if own is not None:
                    key = RecordKey(OF_ROUTERS, number - 1, "0")
                    own = own * self.update.scale.value
                    records[key] = records[key] + own if key in records else own
        return records

    def _backward(self, total: Tensor, weight: Tensor, added: Sequence[Tensor]) -> None:
        """Compute the gradients of a micro-batch's share of the mean loss, and of losses `added` to it."""
        scale = self.update.scale.value
        seeds = [(scale / weight).to(total), *(torch.full_like(one, scale) for one in added)]
        with self.casts:
            torch.autograd.backward([total, *added], seeds)

    def _chosen(self, scope: RecordScope, number: int) -> list[Tensor]:
        """Return the experts, if known, to which layer `number` sends the tokens of a micro-batch."""
        if scope.evaluated:
            return [] if self.routed is None else experts_in([self.routed.values[scope]], number)
        rows = self.dropout.rows[scope.microbatch]
        return [whole[rows.start : rows.stop] for whole in self.chosen[number]]

    def _total(self, output: Value, targets: Value, *, checked: bool) -> Tensor:
        """Return the summed loss; `checked`: require that it depends on these arguments alone."""
        with failure_named("the loss"):
            with self.casts:
                total = self.loss.total(output, targets)
            require_values("the loss", total)
            if checked:
                require_function_of_output(self.loss, total.detach(), output, targets)
        self.epsilon_of_loss = torch.finfo(total.dtype).eps
        return total

    def _reset(self, tensor: Tensor, scope: RecordScope, key: RecordKey) -> None:
        """Replace the value of a tensor between layers by the baseline's with rounding errors, if any."""
        if self.baseline is not None and self.baseline.narrowing:
            tensor.data = self.perturbation.perturb(self.baseline.values[scope][key].clone())

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

    def _mean(self, step: int, inputs: Value, targets: Value, microbatches: int) -> Tensor:
        """Return the mean loss of a whole batch, without gradients and without changing the layers.

        Its routing is that of the step.
        """
        rows = len(next(tensors_of(inputs)))
        self.dropout.rows = [range(rows)]
        self.chosen, calls = [], list[RouterCall]()
        before = HeldState.of(self.layers)
        before.set_back(to_copies=True)
        parts = [RecordScope(step, number) for number in range(microbatches)]
        recorded = [] if self.routed is None else [self.routed.values[part] for part in parts]
        with torch.no_grad(), self._running(inputs, microbatches) as (given, ids):
            value = map_tensors(torch.clone, given)
            for number, layer in enumerate(self.layers):
                self.definitions.routing.begin(experts_in(recorded, number))
                with failure_named(layer.path or "the model"):
                    value = map_tensors(torch.clone, self._run(layer, 0, value))
                    calls += self.definitions.routing.calls
                    chosen = [call.indices for call in self.definitions.routing.calls]
                    self.chosen.append([one.view(rows, -1, one.shape[1]) for one in chosen])
            total = self._total(value, targets, checked=False)
        before.set_back()
        self.router_losses.begin(calls, ids, rows)
        return total.double() / self._divisor([targets])
