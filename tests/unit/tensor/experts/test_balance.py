"""Auxiliary losses and the correction of biases, by their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ModelError
from plait.tensor.experts.balance import Balance, corrected_bias, count_choices, token_balance, token_z
from plait.tensor.experts.routing import Routing

EXPERTS, TOP_K, LENGTH = 6, 2, 10


def choices(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and choices of some rows, and the number of each token's row."""
    logits = torch.randn(rows * LENGTH, EXPERTS, generator=torch.Generator().manual_seed(seed)).double()
    documents = torch.arange(rows).repeat_interleave(LENGTH)
    return logits, logits.topk(TOP_K).indices, documents


def test_choices_are_counted_by_document_without_padding() -> None:
    indices = torch.tensor([[0, 3], [3, 1], [5, 0], [-1, -1], [3, 0]])
    documents = torch.tensor([0, 0, 1, 2, 1])  # two documents: the fourth token is padding
    assert count_choices(indices, documents, 2, 6).tolist() == [[1, 1, 0, 2, 0, 0], [2, 0, 0, 1, 0, 1]]


def test_an_even_load_has_the_balance_loss_k() -> None:
    indices = torch.arange(12).remainder(EXPERTS).view(6, TOP_K)
    load = count_choices(indices, torch.zeros(6, dtype=torch.int64), 1, EXPERTS).double() / 6
    probabilities = torch.randn(6, EXPERTS).double().softmax(-1)
    total = token_balance(probabilities, load, torch.zeros(6, dtype=torch.int64)) / 6
    torch.testing.assert_close(total.item(), float(TOP_K), rtol=1e-14, atol=0)


def test_the_step_of_one_layer_has_the_loss_of_switch_transformer_times_k() -> None:
    """Equation 4 has α N Σ f P, with f a share of choices, of which each token has one."""
    logits, indices, documents = choices(3)
    one = torch.zeros_like(documents)
    counts = count_choices(indices, one, 1, EXPERTS)
    found = token_balance(logits.softmax(-1), counts.double() / len(logits), one) / len(logits)
    shares = torch.bincount(indices.flatten(), minlength=EXPERTS).double() / indices.numel()
    expected = TOP_K * EXPERTS * sum(f * p for f, p in zip(shares, logits.softmax(-1).mean(0), strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_documents_of_one_length_have_the_sequence_wise_loss_of_deepseek_times_k() -> None:
    """Equations 17 to 20 of DeepSeek-V3, one sequence after the other, of sigmoids over their sum."""
    logits, _, documents = choices(3)
    routing = Routing(scores="sigmoid", corrected=True)
    scores = logits.sigmoid()
    correction = torch.linspace(-1, 1, EXPERTS).double()
    biased = routing.choose(scores, correction, TOP_K)
    counted = routing.uncorrected_choice(logits, biased)
    assert not torch.equal(biased.sort(-1).values, counted.sort(-1).values)
    load = count_choices(counted, documents, 3, EXPERTS).double() / LENGTH
    found = token_balance(routing.probabilities(logits), load, documents) / len(logits)
    losses = []
    for sequence in scores.split(LENGTH):
        chosen = torch.zeros_like(sequence).scatter(1, sequence.topk(TOP_K).indices, 1.0)
        f = EXPERTS / (TOP_K * LENGTH) * chosen.sum(0)
        p = (sequence / sequence.sum(-1, keepdim=True)).mean(0)
        losses.append((f * p).sum())
    torch.testing.assert_close(found, TOP_K * torch.stack(losses).mean(), rtol=1e-13, atol=0)


class InFloat64:
    """torch, with float64 under the name of float32, in which transformers adds up."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_coupled_layers_have_the_loss_of_transformers(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [choices(3, seed) for seed in range(4)]
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    if padded:
        mask[0, 6:], mask[2, 1:] = 0, 0
    logits = tuple(one for one, _, _ in layers)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(mixtral, "torch", InFloat64())
    expected = mixtral.load_balancing_loss_func(logits, EXPERTS, TOP_K, mask if padded else None)
    documents = torch.where(mask.flatten() > 0, 0, 1)  # one document, or padding
    tokens = int(mask.sum())
    counts = sum(count_choices(indices, documents, 1, EXPERTS) for _, indices, _ in layers)
    load = counts.double() / (len(layers) * tokens)
    losses = [token_balance(one.softmax(-1), load, documents) / (len(layers) * tokens) for one in logits]
    torch.testing.assert_close(torch.stack(losses).sum(), expected, rtol=1e-12, atol=0)


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum_of_exponentials() -> None:
    logits, _, _ = choices(2)
    counted = torch.arange(len(logits)) % 3 > 0
    expected = sum(float(row.exp().sum().log()) ** 2 for row in logits[counted])
    torch.testing.assert_close(token_z(logits, counted).item(), expected, rtol=1e-13, atol=0)


def test_a_bias_rises_for_experts_below_the_mean_load_and_falls_above_it() -> None:
    counts = torch.tensor([4, 0, 2, 3, 1, 2])
    bias = corrected_bias(torch.zeros(6), counts, 0.25)
    assert bias.tolist() == [-0.25, 0.25, 0.0, -0.25, 0.25, 0.0]
    large = torch.tensor([2**40 + 1, 2**40, 2**40 - 1])
    assert corrected_bias(torch.zeros(3), large, 1.0).tolist() == [-1.0, 0.0, 1.0]


def test_gradients_of_the_balance_loss_reach_experts_that_no_token_chose() -> None:
    logits = torch.zeros(4, EXPERTS, dtype=torch.float64, requires_grad=True)
    load = torch.tensor([[1.0, 1.0, 0, 0, 0, 0]]).double()
    documents = torch.zeros(4, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(token_balance(logits.softmax(-1), load, documents), logits)
    assert (gradient[:, :2] > 0).all()
    assert (gradient[:, 2:] < 0).all()
    torch.testing.assert_close(gradient.sum(1), torch.zeros(4).double(), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": -1.0}, "balance.weight is -1.0"),
        ({"z_weight": "much"}, "balance.z_weight"),
        ({"counts": "documents"}, "did you mean document"),
        ({"coupled": 1}, "balance.coupled"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Balance(**options)  # type: ignore[arg-type]
