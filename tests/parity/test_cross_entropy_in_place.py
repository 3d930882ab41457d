"""Whose memory the gradient of the cross-entropy may take: logits that nothing else reads, else a copy's."""

import copy

import pytest
import torch
from torch import Tensor, nn

import plait
from parity.norm import TOLERANCE, assert_close, assert_equal
from plait.plan.plan import Plan

CLASSES, HIDDEN, LENGTH, ROWS = 7, 4, 3, 4


class Head(nn.Module):
    """A linear, in a layer that has more to do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(*sizes)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input)


class Kept(Head):
    """Keeps its logits as an attribute."""

    def forward(self, input: Tensor) -> Tensor:
        self.logits = self.linear(input)
        return self.logits


class Hooked(Head):
    """Has a hook that keeps its logits."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.linear.register_forward_hook(Hooked.keep)

    def keep(self, given: object, output: Tensor) -> None:
        self.logits = output.detach()


class Transposed(Head):
    """Gives a view that is not contiguous."""

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input.transpose(0, 1)).transpose(0, 1)


class Expanded(Head):
    """Gives each position of a sequence the same memory: the logits of the first."""

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input[:, :1]).expand(-1, input.shape[1], -1)


def head(kind: type[nn.Module], *after: nn.Module) -> nn.Module:
    """A model that ends with a head of a kind, and layers after it."""
    return nn.Sequential(nn.Embedding(CLASSES, HIDDEN), nn.Tanh(), kind(HIDDEN, CLASSES), *after)


MODELS = {
    "linear": lambda: head(nn.Linear),
    "within a layer": lambda: head(Head),
    "kept": lambda: head(Kept),
    "hooked": lambda: head(Hooked),
    "transposed": lambda: head(Transposed),
    "expanded": lambda: head(Expanded),
    "read by its backward": lambda: head(nn.Linear, nn.Tanh()),
    "read by the backward before": lambda: head(nn.Linear, nn.Tanh(), nn.Identity()),
    "no linear": lambda: nn.Sequential(nn.Embedding(CLASSES, CLASSES)),
    "passed on": lambda: head(nn.Linear, nn.Identity()),
}
PLANS = [
    pytest.param({"schedule": "gpipe"}, id="eager"),
    pytest.param({"recompute": "selective"}, id="recomputed", marks=pytest.mark.full),
    pytest.param({"compile": True}, id="in graphs", marks=pytest.mark.full),
]


@pytest.mark.parametrize("fields", PLANS)
def test_only_logits_that_nothing_else_reads_are_overwritten(thread_ranks, fields):
    plan = Plan(microbatches=2, precision="fp64", **fields)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)

    def body():
        found = {}
        for name, build in MODELS.items():
            torch.manual_seed(0)
            model = build().double()
            engine = plait.parallelize(copy.deepcopy(model), plan, plait.Mesh(plan), plait.cross_entropy)
            for _ in range(2):  # recomputation keeps less from the second step on
                for parameter in engine.parameters():
                    parameter.grad = None
                loss = engine.forward_backward(tokens, targets)
            layers = [layer.module for layer in engine._runner.pipeline.stages[0].layers]
            modules = [one for layer in layers for one in layer.modules()]
            kept = [vars(one)["logits"] for one in modules if "logits" in vars(one)]
            if plan.compile:  # graphs do not set attributes
                kept.clear()
            gradients = {name: one.grad for name, one in engine.named_parameters()}
            found[name] = model, loss, gradients, kept
        return found

    (found,) = thread_ranks.run(body, ranks=1)
    for name, (model, loss, gradients, kept) in found.items():
        logits = model(tokens)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        expected.backward()
        assert_close(loss.item(), expected.item(), TOLERANCE[torch.float64], name)
        wanted = {place: one.grad for place, one in model.named_parameters()}
        assert_equal(gradients, wanted, TOLERANCE[torch.float64], name)
        for one in kept:
            assert (one - logits[-ROWS // 2 :]).abs().max() <= 1e-12, name
    keeping = [name for name, (*_, kept) in found.items() if kept]
    assert keeping == ([] if plan.compile else ["kept", "hooked"])
