"""The text by which ranks compare their calls of `parallelize`: each thing that acts otherwise changes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine.fingerprint import fingerprint, fingerprint_of_tokens, lines_of_values
from plait.models.layers.comparable_value_text import digest_of
from plait.models.layers.layer_sequence import sequence_of
from plait.rules import column, row
from plait.tensor.microbatches import Microbatches


class Loss:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).mean() * self.factor


def made() -> Any:
    """Two linears with one weight, and a module that stands twice."""
    activation = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), activation, nn.Linear(2, 2, bias=False), activation)
    model[2].weight = model[0].weight
    return model


def text(
    model: Any = None,
    plan: Any = None,
    counts: Any = (4,),
    order: Any = (("F0", "B0"),),
    rules: Any = None,
    loss: Any = None,
    **options: Any,
) -> str:
    model = model or made()
    schedule, given = SimpleNamespace(order=order), {"clip": 1.0, **options}
    return fingerprint(
        model, sequence_of(model), plan or plait.Plan(), counts, schedule, rules or {}, loss or Loss(), given
    )  # type: ignore[arg-type]


def test_the_fingerprint_of_a_model_lists_versions_tensors_options_and_rules() -> None:
    lines = text(rules={"b": row, "a": column}).splitlines()
    assert lines == text(made(), rules={"a": column, "b": row}).splitlines()
    for line in (
        f"plait = {plait.__version__}",
        f"torch = {torch.__version__.partition('+')[0]}",
        "clip = 1.0",
        "plan.tp = 1",
        "layers per stage = (4,)",
        f"the order of actions = {digest_of(b'F0 B0')}",
        "loss.factor = 1.0",
        "0 = torch.nn.modules.linear.Linear",
        "0.in_features = 2",
        "0.weight = float32[2, 2], requires_grad = True",
        "0.bias = float32[2], requires_grad = True",
        "hooks of 0 = {}",
        "1.training = True",
        "2.weight = 0.weight",
        "3 = 1",
        "0.weight in layers (0, 2)",
    ):
        assert line in lines, line
    assert sum(line.startswith(("0.bias", "1.bias")) for line in lines) == 1
    assert [line.partition(" = ")[0] for line in lines if line.startswith("rules")] == [
        "rules of a",
        "rules of b",
    ]


def test_every_change_of_behaviour_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = text()
    changes: list[Callable[[Any], object]] = [
        lambda model: model[0].bias.requires_grad_(False),
        lambda model: model[0].register_buffer("table", torch.ones(2)),
        lambda model: model[1].register_forward_hook(lambda *_: None),
        lambda model: setattr(model[1], "kind", "a"),
        lambda model: model[3].eval(),
        lambda model: setattr(model[2], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: model.double(),
        lambda model: model.__setitem__(3, nn.Tanh()),
    ]
    texts = [usual]
    for change in changes:
        change(model := made())
        texts.append(text(model))
    texts.append(text(plan=plait.Plan(microbatches=2)))
    texts.append(text(counts=(2, 2)))
    texts.append(text(order=(("F0",), ("B0",))))
    texts.append(text(rules={"0": column}))
    texts.append(text(loss=Loss(2.0)))
    texts.append(text(loss=plait.cross_entropy))
    texts.append(text(clip=2.0))
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, ":4096:8")
        texts.append(text())
        assert f"environment variable {name} = :4096:8\n" in texts[-1]
        monkeypatch.delenv(name)
    assert len({*texts}) == len(texts)
    assert text() == usual


def test_tokens_and_values_are_compared_by_their_bits() -> None:
    ids, other, fraction = torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([0.5])
    assert fingerprint_of_tokens(ids) == fingerprint_of_tokens(ids.clone(), fraction)
    assert len(fingerprint_of_tokens(ids)) == 16
    assert fingerprint_of_tokens(Microbatches([ids, other])) == fingerprint_of_tokens([ids, other])
    different = [
        fingerprint_of_tokens(ids),
        fingerprint_of_tokens(other),
        fingerprint_of_tokens(ids.int()),
        fingerprint_of_tokens(other, ids),
        fingerprint_of_tokens(ids, other),
        fingerprint_of_tokens(ids, fraction, every=True),
        fingerprint_of_tokens(ids, fraction + 1, every=True),
    ]
    assert len({*different}) == 7
    named = [("a", ids), ("b", other)]
    bits = [digest_of(one.numpy().tobytes()) for one in (ids, other)]
    assert lines_of_values(named) == f"a = bits {bits[0]}\nb = bits {bits[1]}"
