"""A small model of experts; runs of it by plans; its auxiliary losses in plain PyTorch, on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from plait.plan.plan import Plan
from plait.rules import column, row, sequence
from plait.tensor.experts.balance import Balance
from plait.tensor.experts.routing import Routing

VOCAB, HIDDEN, EXPERTS, TOP_K, LAYERS, LENGTH, ROWS, STEPS = 11, 6, 5, 2, 3, 12, 8, 3
RULES = {"*.up": column, "*.down": row, "1": sequence, "3": sequence}


class Block(nn.Module):
    """An MLP, then a mixture of experts, of `[rows, length, hidden]`."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8, bias=False), nn.Linear(8, HIDDEN, bias=False)
        self.mixture = plait.MixtureOfExperts(HIDDEN, 4, EXPERTS, TOP_K, routing=routing)

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.down(torch.tanh(self.up(value)))
        mixed: Tensor = self.mixture(value)
        return value + mixed


def build(balance: Balance) -> nn.Module:
    """The model in float64; with a rate of correction its routers have biases, in float32."""
    torch.manual_seed(0)
    routing = Routing(corrected=balance.bias_rate > 0)
    blocks = [Block(routing) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCAB)).double()
    for block in blocks:
        router = block.mixture.router
        nn.init.normal_(router.weight)
        router.balance = balance
        if balance.bias_rate:
            router.e_score_correction_bias = torch.linspace(-0.1, 0.1, EXPERTS)
    model.rules = RULES  # type: ignore[assignment]
    return model


def document_ids(packed: bool) -> Tensor | None:
    """Three documents of unlike lengths in each row and then, in some, padding."""
    if not packed:
        return None
    ids = torch.empty(ROWS, LENGTH, dtype=torch.int64)
    for number, one in enumerate(ids):
        first, second = 1 + number % 4, 5 + number % 3
        one[:first], one[first:second], one[second:] = 0, 1, 2
        if number % 3:
            one[LENGTH - number :] = -1
    return ids


def batch(step: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, `[rows, length]`; padding and some others are no targets."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.2] = -100
    return tokens, targets if ids is None else targets.where(ids >= 0, -100)


@dataclass
class Outcome:
    """Of each step: the gradients, the losses of routers, the choices; and what the biases are after it."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[dict[str, Tensor]] = field(default_factory=list)
    tokens: list[dict[str, Tensor]] = field(default_factory=list)
    biases: list[dict[str, Tensor]] = field(default_factory=list)


def run(plan: Plan, balance: Balance, packed: bool) -> Outcome:
    """Train by a plan."""
    engine = plait.parallelize(build(balance), plan, plait.Mesh(plan), loss=plait.cross_entropy)
    optimizer, outcome, ids = torch.optim.SGD(engine.parameters(), lr=0.1), Outcome(), document_ids(packed)
    share = ROWS // plan.dp
    rows = slice(share * engine.mesh.index("dp"), share * (engine.mesh.index("dp") + 1))
    for step in range(STEPS):
        tokens, targets = (one[rows] for one in batch(step, ids))
        inputs: Any = tokens if ids is None else {"tokens": tokens, "document_ids": ids[rows]}
        optimizer.zero_grad()
        engine.forward_backward(inputs, targets)
        engine.evaluate(inputs, targets)
        outcome.gradients.append({name: one.clone() for name, one in engine.named_gradients()})
        optimizer.step()
        load = engine.expert_load
        assert load is not None
        both = {"balance": load.balance, "z": load.z}
        outcome.losses.append(
            {f"{name} {path}": one for name, of in both.items() for path, one in of.items()}
        )
        outcome.tokens.append(dict(load.tokens))
        state = engine.state_dict(everywhere=True)
        outcome.biases.append(
            {name: one for name, one in state.items() if name.endswith("bias") and "4" not in name}
        )
    return outcome


def expected(balance: Balance, packed: bool) -> Outcome:
    """The same in plain PyTorch: the whole batch at once, sums over documents and experts written out."""
    model, outcome, ids = build(balance), Outcome(), document_ids(packed)
    routers = {f"{number}.mixture.router": model[number].mixture.router for number in range(1, LAYERS + 1)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for path, router in routers.items():

        def keep(module: nn.Module, given: Any, output: Any, path: str = path) -> None:
            seen[path] = output[0], output[2]

        router.register_forward_hook(keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before: dict[str, Tensor] | None = None
    for step in range(STEPS):
        tokens, targets = batch(step, ids)
        optimizer.zero_grad()
        main = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        counted = torch.ones_like(tokens, dtype=torch.bool) if ids is None else ids >= 0
        counted = counted.flatten()
        documents = documents_of(ids)
        of_layers = {path: (logits[counted], indices[counted]) for path, (logits, indices) in seen.items()}
        choices = {path: one_hot(indices).sum(0).long() for path, (_, indices) in of_layers.items()}
        values = losses_of(of_layers, documents[counted], balance, before)
        z = {path: logits.logsumexp(-1).square().mean() for path, (logits, _) in of_layers.items()}
        total = main + balance.weight * sum(values.values()) + balance.z_weight * sum(z.values())
        total.backward()
        outcome.gradients.append({name: one.grad.clone() for name, one in model.named_parameters()})
        outcome.losses.append(
            {f"balance {path}": one.detach() for path, one in values.items() if balance.weight}
            | {f"z {path}": one.detach() for path, one in z.items() if balance.z_weight}
        )
        outcome.tokens.append(choices)
        before = choices
        optimizer.step()
        for path, router in routers.items():
            bias = router.e_score_correction_bias
            if bias is not None:
                mean = choices[path].sum() / EXPERTS
                bias += balance.bias_rate * torch.sign(mean - choices[path])
        outcome.biases.append({name: one.clone() for name, one in model.named_buffers()})
    return outcome


def documents_of(ids: Tensor | None) -> Tensor:
    """A number of its document for each token, `[rows · length]`."""
    if ids is None:
        return torch.arange(ROWS).repeat_interleave(LENGTH)
    return (10 * torch.arange(ROWS)[:, None] + ids).flatten()


def one_hot(indices: Tensor) -> Tensor:
    """`[T, k]` as `[T, E]`: 1 for what was chosen."""
    return functional.one_hot(indices, EXPERTS).sum(1).double()


def losses_of(
    layers: dict[str, tuple[Tensor, Tensor]],
    documents: Tensor,
    balance: Balance,
    before: dict[str, Tensor] | None,
) -> dict[str, Tensor]:
    """The balance loss of each layer, from logits and choices of all tokens of the step."""
    probabilities = {path: logits.softmax(-1) for path, (logits, _) in layers.items()}
    # Of the counts of this step those without the bias.
    chosen = {path: one_hot(one.topk(TOP_K).indices) for path, one in probabilities.items()}
    if balance.counts == "previous":
        uniform = torch.full((EXPERTS,), 1.0 / EXPERTS, dtype=torch.float64)
        load = {
            path: TOP_K * uniform if before is None else TOP_K * before[path].double() / before[path].sum()
            for path in layers
        }
        if balance.coupled:
            load = dict.fromkeys(layers, torch.stack(list(load.values())).mean(0))
        share = len(layers) if balance.coupled else 1
        return {
            path: EXPERTS * (load[path] * one.mean(0)).sum() / share for path, one in probabilities.items()
        }
    sets = [torch.ones_like(documents, dtype=torch.bool)]
    if balance.counts == "document":
        sets = [documents == one for one in documents.unique()]
    found = {}
    for path, one in probabilities.items():
        every = list(chosen.values()) if balance.coupled else [chosen[path]]
        terms = []
        for members in sets:
            load = torch.stack([of[members].mean(0) for of in every]).mean(0)
            terms.append(members.sum() * EXPERTS * (load * one[members].mean(0)).sum())
        found[path] = sum(terms) / len(documents) / len(every)
    return found
