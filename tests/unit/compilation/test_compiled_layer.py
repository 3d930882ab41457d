"""Compiled layers: how often they are traced, what they allocate, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.compilation import layer_graphs
from plait.errors import ModelError, PlanError

WIDTH, INNER = 6, 10
MICROBATCHES = 2


class Residual(nn.Module):
    """Two linears, a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Wide(Residual):
    """Another kind of layer with the same parameters."""


class Counting(nn.Module):
    """Writes to a buffer in its forward, which no graph may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x) * 2


def model_of(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(kind() for kind in kinds)).double()


def engine_of(model: nn.Module, **options: Any) -> Any:
    plan = plait.Plan(microbatches=MICROBATCHES, **options)
    return plait.parallelize(model, plan, plait.Mesh(plan), nn.functional.mse_loss)


def batch_of(rows: int) -> Tensor:
    return torch.randn(
        rows * MICROBATCHES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)
    )


def on_one_rank(run: Any) -> Any:
    return plait.launch(run, ranks=1, ranks_as="threads")[0]


def gradients_of(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """After a step on one rank."""

    def run() -> dict[str, Tensor]:
        engine, batch = engine_of(model, **options), batch_of(3)
        engine.forward_backward(batch, batch)
        return {name: gradient.clone() for name, gradient in engine.named_gradients()}

    gradients: dict[str, Tensor] = on_one_rank(run)
    return gradients


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the layers that are traced from here on."""
    paths: list[str] = []
    trace = layer_graphs.trace_layer

    def noting(layer: Any, *arguments: Any, **named: Any) -> Any:
        paths.append(layer.path)
        return trace(layer, *arguments, **named)

    monkeypatch.setattr("plait.compilation.compiled_layer.trace_layer", noting)
    return paths


def test_each_structure_is_traced_once_for_each_shape(traced: list[str]) -> None:
    def run() -> None:
        engine = engine_of(model_of(Residual, Residual, Wide, Residual, Wide), compile="graphs")
        for step in range(5):
            batch = batch_of(2 + step % 2)
            engine.forward_backward(batch, batch)

    on_one_rank(run)
    # The first layer's input requires no gradient; layers 3 and 4 are like 1 and 2.
    assert traced == ["0", "1", "2", "0", "1", "2"]


class NewMemory(TorchDispatchMode):
    """Counts the tensors of some shapes that operations make in memory of their own."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes, self.found = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and tuple(result.shape) in self.shapes:
            before = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
            self.found += result.untyped_storage().data_ptr() not in before
        return result


SHAPES = (INNER, WIDTH), (WIDTH, INNER)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_gradient_of_a_weight_has_memory_of_its_own(recompute: str) -> None:
    def run() -> int:
        engine = engine_of(model_of(Residual, Residual), compile="graphs", recompute=recompute)
        batch = batch_of(3)
        engine.forward_backward(batch, batch)  # makes the buffers
        with NewMemory(*SHAPES) as counted:
            engine.forward_backward(batch, batch)
        return counted.found

    assert on_one_rank(run) == 0
    batch, model = batch_of(3), model_of(Residual, Residual)
    with NewMemory(*SHAPES) as counted:
        nn.functional.mse_loss(model(batch), batch).backward()
    assert counted.found >= 4, "the count finds the gradients of plain PyTorch"


def test_a_weight_that_a_layer_uses_twice_and_one_that_is_no_product() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.rand(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(self.linear(x))) + x @ self.scale + x * self.scale.sum()

    model = model_of(Twice, Residual)
    found, expected = gradients_of(model, compile="graphs"), gradients_of(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13)


def test_a_layer_that_cannot_be_compiled_is_named_with_the_reason() -> None:
    model = model_of(Residual, Counting)
    with pytest.raises(ModelError, match=r"layer '1' cannot be compiled.* mutations.*'where possible'"):
        gradients_of(model, compile="graphs")
    # Of this layer alone, since code is generated for others, which takes seconds.
    only = model_of(Counting)
    assert_same_bits(gradients_of(only, compile="where possible"), gradients_of(only))


def test_documents_and_plans_that_do_not_fit_are_refused() -> None:
    def with_documents() -> None:
        engine = engine_of(model_of(Residual), compile="graphs")
        x = batch_of(3)[:, None]
        batch = {"x": x, "document_ids": torch.zeros(len(x), 1, dtype=torch.int64)}
        engine.forward_backward(batch, x)

    with pytest.raises(PlanError, match="batch with document ids was given to compiled layers"):
        on_one_rank(with_documents)
    with pytest.raises(PlanError, match=r"plan.cp = 2, but layers under context parallelism"):
        plait.Plan(cp=2, compile=True)
    with pytest.raises(PlanError, match="'regather', but compiled layers keep"):
        plait.Plan(tp=2, sequence_parallel="regather", compile=True)
    with pytest.raises(PlanError, match=r"plan\.compile is 'graph': did you mean graphs\?"):
        plait.Plan(compile="graph")  # type: ignore[arg-type]


def test_an_evaluation_between_steps_runs_eagerly() -> None:
    def run() -> None:
        engine, batch = engine_of(model_of(Residual), compile="graphs"), batch_of(3)
        losses = [engine.evaluate(batch, batch), engine.forward_backward(batch, batch)]
        assert torch.equal(*losses)
        assert torch.equal(engine.evaluate(batch, batch), losses[0])

    on_one_rank(run)


@pytest.mark.full
def test_generated_code_rounds_only() -> None:
    model = model_of(Residual, Residual, Residual)
    found, expected = gradients_of(model, compile=True), gradients_of(model)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(gradient.abs().max(), 1e-3 * largest)
        assert (found[name] - gradient).abs().max() <= 1e-13 * scale, name
