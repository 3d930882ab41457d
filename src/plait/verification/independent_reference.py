"""Runs a model that plait did not make on rank 0, in float64 and evaluation mode, with rounding bounds.

The reference run of `verify` is plait's layers on one rank. What both of its runs share, such as a conversion
that makes another model of one of transformers, it cannot see.

Models of transformers compute norms, and some a softmax, in float32 whatever the model's dtype. Where the
order of sums differs in the last bit of float64, such a cast may differ in the last bit of float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.checkpoint.huggingface.tensor_names import TensorPair
from plait.errors import ModelError
from plait.models.layers.layer_sequence import saved_tensors
from plait.tensor.autograd.private_torch_functions import run_backward, run_backward_unseen
from plait.tensor.losses import Loss
from plait.tensor.nested_values import Value, list_of_tensors, map_tensors
from plait.tensor.torch_losses import divisor
from plait.verification.reference.recording import largest_difference, largest_magnitude
from plait.verification.reference.reference_layers import failure_named
from plait.verification.reference.reference_run import Batch
from plait.verification.reference.rounding_errors import Perturbation

NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Float64Mode(TorchFunctionMode):
    """Context in which float64 operations stay in float64, also where the model casts to narrower dtypes."""

    narrow = False
    """Whether a tensor that depends on parameters was narrower all the same."""

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward and len(args) == 2:  # which may run layers again
            with self:
                return run_backward_unseen(*args)
        wide = any(isinstance(one, Tensor) and one.dtype is torch.float64 for one in args)
        if wide and func in _CASTS:
            return args[0]
        if wide:
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.requires_grad and result.dtype in NARROW:
            self.narrow = True
        return result


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in NARROW else argument


FACTOR = 1000
"""A tensor's tolerance is this many times what rounding errors in the parameters change in it, and at least
this many machine epsilons of its size: far below what a mistake changes, and above any order of sums."""
PERTURBED_RUNS = 2
PART_OF_LARGEST = 1e-3
"""Of the largest gradient in the model: a smaller one is compared with so much."""

Pairs = Callable[[nn.Module, nn.Module], Sequence[TensorPair]]
"""Given the model and the reference, returns which of their parameters and buffers have the same values."""


def named_alike(model: nn.Module, reference: nn.Module) -> list[TensorPair]:
    """Return pairs of tensors of `reference` and `model`, by `model.huggingface_names` or equal names.

    Parameters and saved buffers, where both have the same shape.
    """
    names: Mapping[str, str] = getattr(model, "huggingface_names", None) or {}
    theirs: dict[str, Tensor] = reference.state_dict(keep_vars=True)
    return [
        TensorPair(other, (name,), tuple(one.shape))
        for name, one in saved_tensors(model).items()
        if (other := names.get(name, name)) in theirs and theirs[other].shape == one.shape
    ]


def called(reference: Callable[[Any], Any], inputs: Value) -> Any:
    """Return the output of `reference` for `inputs`; of a transformers output object its logits."""
    output = reference(inputs)
    return getattr(output, "logits", output)


@dataclass(frozen=True)
class IndependentReference:
    """An independent model as reference: how rank 0 builds and calls it, and which parameters correspond."""

    make: Callable[[], Callable[[Any], Any]]
    name: str = "the reference"
    pairs: Pairs = named_alike
    call: Callable[[Any, Value], Any] = called
    accuracy: float = 0.0
    """Relative error of constants that it computes in a narrower format, such as rotary angles in float32."""


@dataclass
class Expected:
    """The reference's results for a batch, and how much rounding errors in parameters change them."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    input_gradients: list[Tensor]
    deviations: dict[str, float] = field(default_factory=dict)
    epsilon: float = torch.finfo(torch.float64).eps
    accuracy: float = 0.0

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the results, each with a unique name."""
        for what, tensors in (("output", self.outputs), ("input gradient", self.input_gradients)):
            yield from ((f"{what} {number}", one) for number, one in enumerate(tensors))
        yield "loss", self.loss
        yield from ((f"gradient {name}", one) for name, one in self.gradients.items())

    def allowed(self, name: str, size: float) -> float:
        """Return the largest difference of a tensor of this size that rounding explains."""
        return max(FACTOR * max(self.deviations.get(name, 0.0), self.epsilon * size), self.accuracy * size)

    def smallest_size(self) -> float:
        """Return the least size that a gradient is given in comparisons: 1/1000 of the largest gradient's."""
        return PART_OF_LARGEST * max(map(largest_magnitude, self.gradients.values()), default=0.0)


class ReferenceSide:
    """The reference on rank 0: a copy in float64, in evaluation mode, with the values of the plan's run."""

    def __init__(
        self, loss: Loss, reference: IndependentReference, model: nn.Module, device: torch.device
    ) -> None:
        self.loss, self.call, self.accuracy = loss, reference.call, reference.accuracy
        with failure_named(reference.name):
            made = reference.make()
        self.module = made
        self.parameters: dict[str, nn.Parameter] = {}
        self.matched: list[tuple[TensorPair, nn.Parameter]] = []
        """The parameters that have a counterpart in the model."""
        self.buffers: list[tuple[TensorPair, Tensor]] = []
        """Its buffers that have one."""
        if isinstance(made, nn.Module):
            self.module = module = copy.deepcopy(made).eval().to(device)
            for parameter in module.parameters():  # buffers, such as rotary frequencies, stay as they are
                parameter.data = parameter.data.double() if parameter.is_floating_point() else parameter.data
            self.parameters = dict(module.named_parameters())
            buffers = dict(module.named_buffers())
            for pair in reference.pairs(model, module):
                if pair.theirs in buffers:
                    self.buffers.append((pair, buffers[pair.theirs]))
                else:
                    self.matched.append((pair, module.get_parameter(pair.theirs)))

    def matches_all(self) -> bool:
        """Whether each parameter of the reference has a counterpart in the model."""
        return self.parameters.keys() == {pair.theirs for pair, _ in self.matched}

    @torch.no_grad()
    def set_values(self, state: Mapping[str, Tensor]) -> None:
        """Copy the values in `state`, by the model's names, to parameters and buffers."""
        for pair, tensor in (*self.matched, *self.buffers):
            tensor.copy_(pair.joined([state[name] for name in pair.ours]))

    def run(self, batch: Batch) -> Expected:
        """Return outputs, loss and gradients of a batch, each with its change by rounding errors."""
        expected = self._run(batch)
        if not bool(expected.loss.isfinite()):
            raise ModelError(
                f"the loss of the reference is {expected.loss.item()}: nothing compares with it, so give "
                "other inputs or values."
            )
        own = {name: one.detach().clone() for name, one in self.parameters.items()}
        for number in range(1, PERTURBED_RUNS + 1):
            changed = Perturbation(number)
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(changed.perturb(own[name]))
            moved = dict(self._run((map_tensors(changed.perturb, batch[0]), batch[1])).named())
            for name, tensor in expected.named():
                deviation = largest_difference(moved[name], tensor)
                expected.deviations[name] = max(deviation, expected.deviations.get(name, 0.0))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(own[name])
        return expected

    def _run(self, batch: Batch) -> Expected:
        inputs, targets = map_tensors(_leaf, batch[0]), batch[1]
        for parameter in self.parameters.values():
            parameter.grad = None
        with Float64Mode() as mode, failure_named("the reference"):
            output = self.call(self.module, inputs)
            weight = divisor(self.loss, torch.as_tensor(self.loss.weight(targets)))
            loss = self.loss.total(output, targets) / weight
        if loss.requires_grad:
            run_backward([loss], [torch.ones_like(loss)])
        trained = {name: one for name, one in self.parameters.items() if one.requires_grad}
        return Expected(
            outputs=[one.detach() for one in list_of_tensors(output)],
            loss=loss.detach(),
            gradients={name: _gradient_of(one) for name, one in trained.items()},
            input_gradients=[_gradient_of(one) for one in list_of_tensors(inputs) if one.requires_grad],
            epsilon=torch.finfo(torch.float32 if mode.narrow else torch.float64).eps,
            accuracy=self.accuracy,
        )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zero where the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach()
