"""The single device in plain PyTorch: layers, autograd, `torch.optim`. Nothing of the engine runs here.

Shared with the engine are what a model and a batch are made of (layers in order, rows of micro-batches,
initial values by name), the loss, and that a parameter that no loss depends on has a gradient of zero. Each
layer has aliases of its parameters (the same memory), so that what each use of a tied parameter contributes
to its gradient is seen by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from plait.autograd.dropout import Draws, names_of
from plait.errors import ModelError, PlaitError
from plait.models.initial import initial_value
from plait.pipeline.modes import evaluating
from plait.pipeline.precision import convert
from plait.pipeline.sequence import LayerSequence, NamedLayer, private_copy
from plait.pipeline.values import Value, map_tensors, split, tensors_of
from plait.tensor.given_losses import divisor
from plait.tensor.losses import Loss
from plait.verification.inside import sketched
from plait.verification.noise import Noise
from plait.verification.place import WHOLE, Key, Moment
from plait.verification.recipe import Recipe
from plait.verification.values import Change

Records = dict[Key, Tensor]
Batch = tuple[Value, Value]
"""Inputs and targets of a global batch."""


class Reference:
    """One run on one device, recorded moment by moment."""

    def __init__(
        self,
        sequence: LayerSequence,
        loss: Loss,
        recipe: Recipe,
        change: Change,
        dtype: torch.dtype | None,
        device: torch.device,
        noise: Noise,
        clip: float | None,
    ) -> None:
        self.loss = loss
        self.noise = noise
        self.clip = clip
        self.parameters, self.layers, self.uses = materialise(sequence, recipe.seed, change, dtype, device)
        self.draws = Draws(recipe.seed)
        self.draws.give_to(layer.module for layer in self.layers)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(noise.shake(parameter))
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.epsilon_of_loss = 0.0
        self.looks_inside = recipe.mode != "exact"
        matrices = [p for p in self.trainable.values() if p.dim() >= 2]
        vectors = [p for p in self.trainable.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = recipe.optimizer(groups)

    def run(self, batches: Sequence[Batch], microbatches: int) -> Iterator[tuple[Moment, Records]]:
        """Train on `batches`, each cut into `microbatches`; give each moment when it is done.

        The first, of step -1, is how the parameters start.
        """
        yield Moment(-1, WHOLE), self._values()
        for step, (inputs, targets) in enumerate(batches):
            yield from self._step(step, inputs, targets, microbatches)
        inputs, targets = batches[-1]
        with evaluating(layer.module for layer in self.layers):
            mean = self._mean(inputs, targets)
        yield Moment(len(batches), WHOLE), {Key("evaluation"): mean}

    def _step(
        self, step: int, inputs: Value, targets: Value, microbatches: int
    ) -> Iterator[tuple[Moment, Records]]:
        self.draws.step = step
        whole = self._mean(inputs, targets)
        parts = split(targets, microbatches, "targets")
        given = split(inputs, microbatches, "inputs")
        rows = [len(next(tensors_of(one))) for one in given]
        self.draws.rows = [range(*ends) for ends in pairwise(accumulate(rows, initial=0))]
        weight = torch.stack([torch.as_tensor(self.loss.weight(part)).double() for part in parts]).sum()
        weight = divisor(self.loss, weight)
        for parameter in self.trainable.values():
            parameter.grad = torch.zeros_like(parameter)
        totals = []
        for number, (part, wanted) in enumerate(zip(given, parts, strict=True)):
            records = self._microbatch(number, part, wanted, weight)
            totals.append(records[Key("total")].double())
            yield Moment(step, number), records
        records = {Key("mean"): torch.stack(totals).sum() / weight, Key("whole"): whole}
        yield Moment(step, WHOLE), records | self._update()

    def _microbatch(self, microbatch: int, inputs: Value, targets: Value, weight: Tensor) -> Records:
        records: Records = {}

        def boundary(value: Value, layer: int) -> Value:
            """Record what flows, and its gradient when that comes; go on with a copy that may be written."""
            numbers = iter(range(len(list(tensors_of(value)))))

            def pass_on(tensor: Tensor) -> Tensor:
                name = str(next(numbers))
                shaken = self.noise.shake(tensor)
                records[Key("output", layer, name)] = shaken.detach().clone()
                copied = shaken.clone()
                if copied.requires_grad:
                    copied.register_hook(partial(keep, Key("gradient", layer, name)))  # type: ignore[no-untyped-call]
                return copied

            return map_tensors(pass_on, value)

        def keep(key: Key, gradient: Tensor) -> Tensor:
            shaken = self.noise.shake(gradient)
            records[key] = shaken.detach().clone()
            return shaken

        value = boundary(inputs, -1)
        for number, layer in enumerate(self.layers):
            looking = sketched(layer.module, wanted=self.looks_inside)
            with telling(layer.path or "the model"), drawing_nothing(layer.path), looking as inside:
                output = self._run(layer, microbatch, value)
            records |= {Key("inside", number, name): sketch for name, sketch in inside.items()}
            value = boundary(output, number)
        with telling("the loss"):
            total = self.loss.total(value, targets)
        self.epsilon_of_loss = torch.finfo(total.dtype).eps
        records[Key("total")] = total.detach().clone()
        if total.requires_grad:
            (total / weight.to(total.dtype)).backward()  # type: ignore[no-untyped-call]
        for number, uses in enumerate(self.uses):
            for name, alias in uses.items():
                if alias.grad is not None:
                    contribution = self.noise.shake(alias.grad)
                    records[Key("contribution", number, name)] = contribution
                    self.trainable[name].grad.add_(contribution)  # type: ignore[union-attr]
                    alias.grad = None
        return records

    def _run(self, layer: NamedLayer, microbatch: int, value: Value) -> Value:
        with self.draws.at(microbatch, layer.path, names_of(layer.module)):
            return layer.module(value)

    def _update(self) -> Records:
        """Norm, clipping and the step of the optimizer."""
        records: Records = {}
        for name, parameter in self.trainable.items():
            assert parameter.grad is not None
            records[Key("final", name=name)] = parameter.grad.clone()
        norm = nn.utils.get_total_norm(
            [p.grad.double() for p in self.trainable.values() if p.grad is not None]
        )
        if self.clip is None:
            self.clip = float(norm) / 2 or math.inf
        nn.utils.clip_grads_with_norm_(self.trainable.values(), self.clip, norm)
        records[Key("norm")], records[Key("clip")] = norm, torch.tensor(self.clip, dtype=torch.float64)
        for name, parameter in self.trainable.items():
            assert parameter.grad is not None
            records[Key("clipped", name=name)] = parameter.grad.clone()
        self.optimizer.step()
        for uses in self.uses:
            for name, alias in uses.items():
                alias.data = self.parameters[name].data  # an optimizer may have given it other memory
        records |= self._values()
        for name, parameter in self.trainable.items():
            for entry, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor):
                    records[Key("state", name=f"{name}/{entry}")] = state.detach().clone()
        return records

    def _values(self) -> Records:
        return {Key("value", name=name): p.detach().clone() for name, p in self.parameters.items()}

    def _mean(self, inputs: Value, targets: Value) -> Tensor:
        """The loss of a batch that nobody cuts."""
        value = map_tensors(torch.clone, inputs)
        self.draws.rows = [range(len(next(tensors_of(inputs))))]
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


def materialise(
    sequence: LayerSequence, seed: int, change: Change, dtype: torch.dtype | None, device: torch.device
) -> tuple[dict[str, nn.Parameter], list[NamedLayer], list[dict[str, nn.Parameter]]]:
    """The parameters with values by name, the layers on aliases of them, and each layer's aliases by name."""
    names = {id(parameter): name for name, parameter in sequence.parameters.items()}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    layers, uses = [], []
    for layer in sequence.layers:
        tensors: dict[int, Tensor] = {}
        aliases: dict[str, nn.Parameter] = {}
        for local, parameter in layer.module.named_parameters():
            name = names[id(parameter)]
            if name not in parameters:
                value = change(name, initial_value(layer.module, layer.path, local, seed))
                parameters[name] = nn.Parameter(convert(value, dtype, device), parameter.requires_grad)
            alias = nn.Parameter(parameters[name].data, parameter.requires_grad)
            tensors[id(parameter)] = aliases[name] = alias
        for local, buffer in layer.module.named_buffers():
            if id(buffer) not in buffers:
                value = initial_value(layer.module, layer.path, local, seed)
                buffers[id(buffer)] = convert(value, dtype, device)
            tensors[id(buffer)] = buffers[id(buffer)]
        layers += private_copy([layer], tensors)
        uses.append({name: alias for name, alias in aliases.items() if alias.requires_grad})
    return parameters, layers, uses
