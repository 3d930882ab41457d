"""`plait.Dropout` by itself: what it computes, what it saves, and what its masks depend on."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError
from plait.plan.layout.sequence_layout import sequence_layout
from plait.plan.plan import ContextLayout
from plait.ranks.group import Group, Traffic
from plait.tensor.dropout import (
    Dropout,
    DropoutGenerator,
    dropout_of,
    from_plain_dropout,
    is_plain_dropout,
    key_of,
    names_of,
    set_region_part,
    set_sequence_part,
)
from plait.tensor.dropout_mask import DimPart, keep_mask
from plait.tensor.running_sequence import ContextParallelism, running

FIRST_KEY = -8675667782052486675


def mask_of(module: Dropout, *shape: int) -> Tensor:
    result: Tensor = module(torch.ones(shape)) != 0
    return result


def test_dropout_zeroes_elements_and_scales_the_rest() -> None:
    module = Dropout(0.25)
    given = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    output = module(given)
    kept = output != 0
    assert torch.equal(output, torch.where(kept, given * (1 / 0.75), 0.0))
    assert 0.7 < kept.double().mean() < 0.8
    seed = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, given, seed)
    assert torch.equal(gradient, torch.where(kept, seed * (1 / 0.75), 0.0))


def test_dropped_nan_and_infinity_become_zero() -> None:
    given = torch.tensor([float("nan"), float("inf"), -1.0] * 20, requires_grad=True)
    output = Dropout(1.0)(given)
    assert torch.equal(output, torch.zeros(60))
    output.sum().backward()
    assert torch.equal(given.grad, torch.zeros(60))


@pytest.mark.parametrize("module", [Dropout(0.0), Dropout(0.5).eval()], ids=["p = 0", "eval"])
def test_dropout_with_p_zero_or_in_eval_mode_is_the_identity(module: Dropout) -> None:
    given = torch.randn(3)
    assert module(given) is given


def test_outside_an_engine_dropout_follows_torchs_generator() -> None:
    module = Dropout()
    torch.manual_seed(3)
    first, second = mask_of(module, 100), mask_of(module, 100)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(mask_of(module, 100), first)


def test_dropout_on_meta_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    assert Dropout()(torch.empty(3, 4, device="meta")).shape == (3, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_second_derivative_through_dropout_is_right() -> None:
    given = torch.randn(100, dtype=torch.float64, requires_grad=True)
    output = Dropout(0.5)(given) ** 3
    (gradient,) = torch.autograd.grad(output.sum(), given, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), given)
    kept = output.detach() != 0
    assert torch.allclose(second, torch.where(kept, 6 * given * 8, 0.0))


def test_dropout_saves_one_byte_an_element_for_the_backward() -> None:
    saved: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        Dropout(0.5)(torch.randn(5, 6, requires_grad=True))
    assert [(tensor.dtype, tensor.shape) for tensor in saved] == [(torch.bool, (5, 6))]


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_dropout_refuses_a_p_that_is_no_probability(p: float) -> None:
    with pytest.raises(ModelError, match="give a probability, from 0 to 1"):
        Dropout(p)


def attached(module: nn.Module, **changes: Any) -> DropoutGenerator:
    generator = DropoutGenerator(**{"seed": 7, "step": 5, "rows": [range(4), range(4, 6)]} | changes)
    generator.attach_to([module])
    return generator


def drawn(
    generator: DropoutGenerator, module: Dropout, microbatch: int, *shape: int, path: str = "a.b"
) -> Tensor:
    with generator.running(microbatch, path, names_of(module)):
        return mask_of(module, *shape)


def test_a_micro_batch_has_its_rows_of_the_whole_batchs_dropout_mask() -> None:
    module = Dropout(0.5)
    generator = attached(module)
    whole = keep_mask(key_of(7, 5, "a.b", 0), (6, 30), 0.5, {}, torch.device("cpu"))
    assert torch.equal(drawn(generator, module, 0, 4, 30), whole[:4])
    assert torch.equal(drawn(generator, module, 1, 2, 30), whole[4:])
    assert torch.equal(drawn(generator, module, 1, 2, 5, 6), whole[4:].view(2, 5, 6))
    assert torch.equal(drawn(generator, module, 1, 10, 6), whole[4:].view(10, 6))


def test_a_shard_of_features_has_its_part_of_the_whole_dropout_mask() -> None:
    whole, module = Dropout(0.5), Dropout(0.5)
    generator, _ = attached(whole), set_region_part(module, -1, 1, 3)
    generator.attach_to([module])
    assert module.in_region
    expected = drawn(generator, whole, 1, 2, 7, 12)[..., 4:8]
    assert torch.equal(drawn(generator, module, 1, 2, 7, 4), expected)


@pytest.mark.parametrize("other", [{"seed": 8}, {"step": 6}])
def test_another_seed_or_step_gives_another_dropout_mask(other: dict[str, int]) -> None:
    module = Dropout(0.5)
    first = drawn(attached(module), module, 0, 4, 50)
    assert not torch.equal(drawn(attached(module, **other), module, 0, 4, 50), first)


def test_another_path_or_a_second_call_gives_another_dropout_mask() -> None:
    module = Dropout(0.5)
    generator = attached(module)
    with generator.running(0, "a", names_of(module)):
        first, second = mask_of(module, 4, 50), mask_of(module, 4, 50)
    assert not torch.equal(first, second)
    assert torch.equal(drawn(generator, module, 0, 4, 50, path="a"), first)
    assert not torch.equal(drawn(generator, module, 0, 4, 50, path="b"), first)


def test_the_key_of_a_dropout_mask_stays_that_of_earlier_versions() -> None:
    assert key_of(0, 0, "layer.drop", 0) == FIRST_KEY


@pytest.mark.parametrize("shape", [(3, 2), (), (0, 4)])
def test_dropout_refuses_a_tensor_with_other_rows_than_the_micro_batch(shape: tuple[int, ...]) -> None:
    module = Dropout(0.5)
    generator = attached(module)
    if shape[:1] == (0,):
        assert drawn(generator, module, 0, *shape).shape == shape
    else:
        with pytest.raises(ModelError, match=r"the dropout a\.b was given a tensor of shape .* 4 rows"):
            drawn(generator, module, 0, *shape)


def test_an_attached_dropout_called_outside_its_layers_forward_is_refused() -> None:
    module = Dropout(0.5)
    attached(module)
    with pytest.raises(ModelError, match="runs outside of its layer's forward"):
        mask_of(module, 4)


def in_context(kind: ContextLayout, index: int = 1) -> Any:
    """Rank `index` of three, of sequences of 13 positions."""
    return running(ContextParallelism(Group("cp", (0, 1, 2), index, None, Traffic(), 1.0), kind).sequence(13))


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("kind", get_args(ContextLayout))
def test_a_rank_of_cp_has_its_positions_of_the_whole_dropout_mask(kind: ContextLayout, index: int) -> None:
    module, inside = Dropout(0.5), Dropout(0.5)
    generator = attached(module)
    generator.attach_to([inside])
    set_region_part(inside, -1, 1, 2)
    whole = keep_mask(key_of(7, 5, "a.b", 0), (6, 13, 8), 0.5, {}, torch.device("cpu"))[4:]
    layout = sequence_layout(13, 3, kind)
    expected = layout.cut(whole, index)
    with in_context(kind, index):
        assert torch.equal(drawn(generator, module, 1, *expected.shape), expected)
        assert torch.equal(drawn(generator, inside, 1, 2, layout.size(index), 4), expected[..., 4:])


def test_with_cp_and_sequence_parallelism_a_rank_has_its_part_of_the_dropout_mask() -> None:
    """With sequence parallelism; these positions are of both chunks of a zigzag."""
    module = Dropout(0.5)
    generator = attached(module)
    set_sequence_part(module, 1, lambda size: DimPart(1, 4))
    whole = keep_mask(key_of(7, 5, "a.b", 0), (6, 13, 8), 0.5, {}, torch.device("cpu"))
    with in_context("zigzag"):
        expected = sequence_layout(13, 3, "zigzag").cut(whole[:4], 1)[:, 1:3]
        assert torch.equal(drawn(generator, module, 0, 4, 2, 8), expected)


@pytest.mark.parametrize("shape", [(4, 8), (16, 8), (4, 8, 4), (8, 4, 8), (4,)])
def test_under_cp_dropout_refuses_positions_outside_dim_1(shape: tuple[int, ...]) -> None:
    module = Dropout(0.5)
    generator = attached(module)
    with in_context("zigzag"), pytest.raises(ModelError) as caught:
        drawn(generator, module, 0, *shape)
    assert str(caught.value) == (
        f"the dropout a.b was given a tensor of shape {list(shape)}, but under context parallelism this "
        "rank has 4 positions of 4 rows: give it one whose dims 0 and 1 are rows and positions, or set "
        "plan.cp to 1."
    )


def test_under_cp_dropout_refuses_heads_in_dim_1() -> None:
    module = Dropout(0.5)
    generator = attached(module)
    set_region_part(module, 1, 0, 2)
    with in_context("zigzag"), pytest.raises(ModelError, match="dims 0 and 1 are rows and positions"):
        drawn(generator, module, 0, 4, 4, 4, 4)


def test_only_unmodified_nn_dropout_counts_as_plain() -> None:
    class Scaled(nn.Dropout):
        pass

    altered = nn.Dropout()
    setattr(altered, "forward", torch.relu)  # noqa: B010
    assert is_plain_dropout(nn.Dropout())
    assert not any(map(is_plain_dropout, (Scaled(), altered, nn.Dropout1d(), nn.Linear(2, 2), Dropout())))


def test_a_replaced_dropout_keeps_its_mode_and_hooks() -> None:
    plain = nn.Dropout(0.3, inplace=True).eval()
    seen: list[object] = []
    plain.register_forward_hook(lambda *_: seen.append(1))
    twin = from_plain_dropout(plain)
    assert (type(twin), twin.p, twin.training, twin.generator, twin.parts) == (Dropout, 0.3, False, None, {})
    twin(torch.ones(2))
    assert seen == [1]
    given = torch.ones(50)
    twin.train()(given)
    assert torch.equal(given, torch.ones(50))
    assert repr(twin) == "Dropout(p=0.3)"


def test_on_meta_the_graph_node_of_a_dropout_names_its_module() -> None:
    module = Dropout(0.5)
    given = torch.empty(3, device="meta", requires_grad=True)
    output = module(given)
    assert dropout_of(output.grad_fn) is module
    assert dropout_of((output * 2).grad_fn) is None
    assert dropout_of(module.eval()(given * 2).grad_fn) is None


def test_dropout_can_be_deep_copied_and_is_public() -> None:
    module = Dropout(0.5)
    set_region_part(module, 1, 0, 2)
    assert copy.deepcopy(module).parts[1](3) == module.parts[1](3)
    assert plait.Dropout is Dropout
