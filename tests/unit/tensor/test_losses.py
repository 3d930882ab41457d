from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError, DataError, ModelError
from plait.ranks import Count, Group, Mesh, Traffic
from plait.tensor import as_loss
from plait.tensor.losses import CrossEntropy, Loss, LossOverVocabulary, PiecewiseLoss, cross_entropy
from plait.tensor.parallel.partition import Vocabulary


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [0, 2])
def test_total_over_weight_is_the_mean_of_torch(
    shape: tuple[int, ...], smoothing: float, ignored: int
) -> None:
    logits = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(5, shape)
    targets.view(-1)[:ignored] = -100
    loss = CrossEntropy(label_smoothing=smoothing)
    mean = loss.total(logits, targets) / loss.weight(targets)
    wanted = functional.cross_entropy(logits.view(-1, 5), targets.view(-1), label_smoothing=smoothing)
    torch.testing.assert_close(mean, wanted, rtol=1e-14, atol=0)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (mean, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-16)
    assert loss.weight(targets).item() == 6 - ignored


def test_cross_entropy_leaves_out_targets_of_a_given_ignore_index() -> None:
    loss, targets = CrossEntropy(ignore_index=3), torch.tensor([3, 1, 3])
    logits = torch.randn(3, 5)
    assert loss.weight(targets).item() == 1
    torch.testing.assert_close(
        loss.total(logits, targets), functional.cross_entropy(logits[1:2], targets[1:2])
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_z_loss_is_added_for_counted_targets(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(2, 3, 5, dtype=dtype), torch.tensor([[3, -100, 1], [0, 4, -100]])
    added = CrossEntropy(z_loss=0.5).total(logits, targets) - cross_entropy.total(logits, targets)
    sums = logits.double()[targets != -100].exp().sum(-1)
    torch.testing.assert_close(added.double(), 0.5 * sums.log().square().sum(), rtol=1e-5, atol=0)


def test_totals_and_weights_of_parts_add_up() -> None:
    logits, targets = torch.randn(8, 5, dtype=torch.float64), torch.tensor([1, -100, 2, 3, -100, -100, 0, 4])
    parts = [(logits[:4], targets[:4]), (logits[4:], targets[4:])]
    total = sum(cross_entropy.total(*part) for part in parts)
    torch.testing.assert_close(total, cross_entropy.total(logits, targets))
    assert sum(cross_entropy.weight(part).item() for _, part in parts) == cross_entropy.weight(targets).item()


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_the_sum_is_made_in_at_least_float32(dtype: torch.dtype, summed: torch.dtype) -> None:
    total = cross_entropy.total(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]))
    assert (total.dtype, total.shape) == (summed, ())


def test_an_object_with_total_and_weight_is_a_loss() -> None:
    class Own:
        def total(self, output: Tensor, targets: Tensor) -> Tensor:
            return output.sum()

        def weight(self, targets: Tensor) -> Tensor:
            return targets.sum()

    assert isinstance(cross_entropy, Loss)
    assert isinstance(Own(), Loss)
    assert not isinstance(functional.cross_entropy, Loss)
    assert not isinstance(nn.CrossEntropyLoss(), Loss)


class ShareOfSquares:
    """A loss that needs whole logits: the targets' squares over the sum of all."""

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        squares = output.square()
        return (squares.gather(-1, targets[:, None]).squeeze(-1) / squares.sum(-1)).sum()

    def weight(self, targets: Tensor) -> Tensor:
        return 3 * targets.sum()


LOGITS = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([6, 0, 1, 5, 2, 4])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("loss", "kind"), [(ShareOfSquares(), "all_gather"), (cross_entropy, "all_reduce")])
def test_a_loss_takes_this_ranks_shard_of_the_logits(thread_ranks, loss, kind, ranks):
    def body():
        mesh = Mesh(tp=ranks)
        vocabulary = Vocabulary(7, mesh.group("tp"))
        own = vocabulary.own
        leaf = LOGITS[:, own.start : own.stop].clone().requires_grad_()
        of_parts = LossOverVocabulary(loss, vocabulary)
        total = of_parts.total(leaf, TARGETS)
        total.backward()
        return total.detach(), leaf.grad, of_parts.weight(TARGETS), mesh.traffic.snapshot()

    leaf = LOGITS.clone().requires_grad_()
    expected = loss.total(leaf, TARGETS)
    expected.backward()
    totals, gradients, weights, traffic = zip(*thread_ranks.run(body, ranks=ranks), strict=True)
    for total, weight in zip(totals, weights, strict=True):
        torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
        assert torch.equal(weight, loss.weight(TARGETS))
    torch.testing.assert_close(torch.cat(gradients, dim=-1), leaf.grad, rtol=1e-12, atol=1e-15)
    sent = {"all_gather": Count(1, 8 * 6 * 3), "all_reduce": Count(2, 8 * 6 * 3)}[kind]
    assert all(counts == ({} if ranks == 1 else {"tp": {kind: sent}}) for counts in traffic)


def test_a_loss_of_sharded_logits_refuses_tensors_of_another_size() -> None:
    vocabulary = Vocabulary(7, Group("tp", (0, 1), 0, None, Traffic(), 1.0))
    for loss in (cross_entropy, ShareOfSquares()):
        with pytest.raises(ModelError, match=r"of shape \[6, 7\].*\[\.\.\., 4\]"):
            LossOverVocabulary(loss, vocabulary).total(LOGITS, TARGETS)


def test_only_losses_for_sharded_logits_are_piecewise() -> None:
    vocabulary = Vocabulary(7, Group("tp", (0,), 0, None, Traffic(), 1.0))
    assert isinstance(cross_entropy, PiecewiseLoss)
    assert not isinstance(ShareOfSquares(), PiecewiseLoss)
    assert isinstance(LossOverVocabulary(ShareOfSquares(), vocabulary), Loss)


@pytest.mark.parametrize("number", [5, -1])
@pytest.mark.parametrize("loss", [cross_entropy, CrossEntropy(z_loss=0.1), CrossEntropy(label_smoothing=0.1)])
def test_a_target_that_is_no_class_is_named(loss: CrossEntropy, number: int) -> None:
    logits, targets = torch.randn(4, 5), torch.tensor([0, -100, number, 4])
    told = f"the target {number} is no class: give numbers from 0 to 4, or -100 for targets to ignore"
    with pytest.raises(DataError, match=told):
        loss.total(logits, targets)


def test_an_output_that_is_no_tensor_is_refused() -> None:
    told = r"was given a dict, but takes a tensor of logits .*plait.models.from_huggingface\(model\)"
    with pytest.raises(ModelError, match=told):
        cross_entropy.total({"logits": torch.randn(2, 5)}, torch.tensor([0, 1]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_of_any_integer_dtype_count_as_those_of_int64(dtype: torch.dtype) -> None:
    """As uint8, torch takes -100 for 156, a byte of which text has many."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 200, generator=generator), torch.tensor([156, 156, 156, 3])
    for loss in (CrossEntropy(), CrossEntropy(z_loss=0.1), as_loss(nn.CrossEntropyLoss())):
        narrow = targets.to(dtype)
        assert int(loss.weight(narrow)) == 4
        assert torch.equal(loss.total(logits, narrow), loss.total(logits, targets))
    weights = torch.rand(200, generator=generator)
    weighted = as_loss(nn.CrossEntropyLoss(weight=weights))
    assert torch.equal(weighted.weight(targets.to(dtype)), weighted.weight(targets))


def test_targets_that_are_no_class_numbers_and_terms_out_of_range_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"the targets are float32\[2\] and the logits \[2, 5\]: give one class"
    ):
        cross_entropy.total(torch.randn(2, 5), torch.zeros(2))
    for options, told in (
        ({"label_smoothing": 1.5}, r"label_smoothing is 1\.5: give a number from 0 to 1"),
        ({"label_smoothing": -0.2}, r"label_smoothing is -0\.2: give a number of at least 0"),
        ({"z_loss": -1}, "z_loss is -1: give a number of at least 0"),
    ):
        with pytest.raises(ConfigError, match=told):
            CrossEntropy(**options)  # type: ignore[arg-type]
