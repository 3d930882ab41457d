"""Helpers of all models: a base class of layers, the head, assembly of the sequence, costs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.initial_values import Constant, Initial, Normal
from plait.plan.decoder_sizes import multiplications
from plait.plan.rules import Rules
from plait.tensor.autograd.eager_operations import TRACE
from plait.tensor.running_sequence import longest_document, running_sequence

INITIAL_STD = 0.02
"""Standard deviation of initial weights (Radford et al. 2018, section 4.1)."""


class InitializedLayer(nn.Module):
    """Base class of layers whose parameters get initial values by their names and shapes."""

    def __init__(
        self, std: float, exceptions: Mapping[str, float] | None = None, *, norm_start: float = 1.0
    ) -> None:
        """`std`: initial standard deviation of matrices; `exceptions`: others, by parameter or module.

        A vector that they name itself is drawn, too. `norm_start`: the initial weight of norms.
        """
        super().__init__()
        self.std, self.exceptions, self.norm_start = std, dict(exceptions or {}), norm_start

    def initial_values(self) -> dict[str, Initial]:
        """Return the initial distribution of each parameter: matrices normal, norms constant, biases 0."""
        found: dict[str, Initial] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            own, *around = reversed(name.split("."))
            asked = (own, *around) if parameter.dim() > 1 else (own,)
            named = next((self.exceptions[one] for one in asked if one in self.exceptions), None)
            if named is not None or parameter.dim() > 1:
                found[name] = Normal(self.std if named is None else named)
            else:
                found[name] = Constant(self.norm_start if name.endswith(".weight") else 0.0)
        return found


class Head(InitializedLayer):
    """`[batch, length, hidden]` → logits `[batch, length, vocab]`: the last norm and the output linear."""

    def __init__(self, norm: nn.Module, hidden: int, vocab: int) -> None:
        super().__init__(INITIAL_STD)
        self.norm = norm
        self.output = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.output(self.norm(x))
        return logits


def head_count(linear: nn.Module, size: int) -> int:
    """Return the number of heads of `size` features in a linear's output; with `tp`, on this rank."""
    # Not by get_parameter: while a layer is traced for plan.compile, its weights are plain tensors.
    return cast(Tensor, linear.weight).shape[0] // size


def block(attention: nn.Module, mlp: nn.Module) -> nn.Sequential:
    """Return one transformer block: an attention layer and an MLP layer."""
    return nn.Sequential(OrderedDict(attention=attention, mlp=mlp))


def assemble(
    embedding: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, *, context: int, rules: Rules
) -> nn.Sequential:
    """Return the model, embedding → blocks.0 … → head, with the attributes `context` and `rules`."""
    model = nn.Sequential(OrderedDict(embedding=embedding, blocks=nn.Sequential(*blocks), head=head))
    model.context = context  # type: ignore[assignment]  # the longest sequence of Engine.generate
    model.rules = rules  # type: ignore[assignment]
    return model


def attention_cost(layer: nn.Module, context: int, width: int) -> float:
    """Return multiplications per token: all matrices, and attention of `width` features over the context."""
    matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    return multiplications(matrices, context=context, width=width)


def require_length(tokens: Tensor, context: int) -> None:
    """Raise ModelError if `tokens` `[rows, length]` have a document longer than the context.

    Without packed documents each sequence is one. In a layer that is traced, each of its calls checks that.
    """
    trace, sequence = TRACE.get(), running_sequence()
    if trace is not None and sequence is not None:
        trace.checks.append(partial(_require_documents, context))
    else:
        _require_length(longest_document(tokens), context)


def _require_documents(context: int) -> None:
    sequence = running_sequence()
    assert sequence is not None
    _require_length(sequence.longest, context)


def _require_length(length: int, context: int) -> None:
    if length > context:
        raise ModelError(
            f"a sequence of {length} tokens is longer than the model's context of {context}: "
            "shorten it or enlarge model.context."
        )
