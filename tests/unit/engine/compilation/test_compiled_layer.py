"""Compiled layers: how often they are traced, what they allocate, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from parity.pairs import in_quick
from plait.engine.compilation import compiled_layer
from plait.engine.compilation.compiled_layer import OutputGradient
from plait.errors import ModelError, PlanError
from plait.rules import column, row
from plait.tensor.microbatches import Microbatches

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


class Writing(nn.Module):
    """Writes to a buffer in its forward, which no graph may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.fill_(1)
        return self.linear(x) * 2


def model_of(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(kind() for kind in kinds)).double()


def engine_of(model: nn.Module, rules: Any = None, **options: Any) -> Any:
    plan = plait.Plan(microbatches=MICROBATCHES, **options)
    return plait.parallelize(model, plan, plait.Mesh(plan), nn.functional.mse_loss, rules=rules)


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
    trace = compiled_layer.trace_layer

    def noting(layer: Any, *arguments: Any, **named: Any) -> Any:
        paths.append(layer.path)
        return trace(layer, *arguments, **named)

    monkeypatch.setattr(compiled_layer, "trace_layer", noting)
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


def run_operations(graph: Any) -> Any:
    return lambda arguments: graph.forward(*arguments)


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs for which code is generated from here on; in place of it their operations run."""
    graphs: list[Any] = []

    def noting(graph: Any) -> Any:
        graphs.append(graph)
        return run_operations(graph)

    monkeypatch.setattr("plait.engine.compilation.graphs_and_eager_operations.with_generated_code", noting)
    return graphs


class Dropping(Residual):
    """With a dropout, whose masks differ in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(super().forward(x))


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_no_layer_is_compiled_after_the_first_step(
    traced: list[str], generated: list[Any], recompute: str
) -> None:
    """With dropout, and micro-batches of two shapes that take turns."""

    def run() -> list[int]:
        engine, counts = engine_of(model_of(Dropping, Dropping), compile=True, recompute=recompute), []
        for _ in range(5):
            batch = Microbatches([batch_of(1), batch_of(2)])
            engine.forward_backward(batch, batch)
            counts.append(len(traced) + len(generated))
        return counts

    first, *others = on_one_rank(run)
    # Two layers, of which the first gives no input gradient, two shapes; forward and backward of each.
    assert first == 4 + 8
    assert set(others) == {first}


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


LAYOUTS = {
    "alone": ({}, "none"),
    "selective": ({}, "selective"),
    "full": ({}, "full"),
    "zb-h1": ({"pp": 2, "schedule": "zb-h1"}, "none"),
    "tp": ({"tp": 2}, "selective"),
}
"""Options of a plan, and `recompute`."""
RULES = {"*.up": column, "*.down": row}


def weights_made(model: nn.Module, **options: Any) -> int:
    """How many tensors of a weight's shape a step makes on this rank, in memory of their own."""
    engine = engine_of(model, rules=RULES, **options)
    inner = INNER // options.get("tp", 1)
    batch = batch_of(3)
    engine.forward_backward(batch, batch)  # makes the buffers
    with NewMemory((inner, WIDTH), (WIDTH, inner)) as counted:
        engine.forward_backward(batch, batch)
    return counted.found


@pytest.mark.parametrize("name", in_quick(LAYOUTS, "alone", "tp", "zb-h1"))
def test_no_gradient_of_a_weight_has_memory_of_its_own(name: str) -> None:
    options, recompute = LAYOUTS[name]
    run = partial(weights_made, model_of(*[Residual] * 4), compile="graphs", recompute=recompute, **options)
    ranks = 2 if options else 1
    assert plait.launch(run, ranks=ranks, ranks_as="threads") == [0] * ranks


def test_the_counter_of_weight_gradient_memory_counts_those_of_plain_pytorch() -> None:
    batch, model = batch_of(3), model_of(Residual, Residual)
    with NewMemory((INNER, WIDTH), (WIDTH, INNER)) as counted:
        nn.functional.mse_loss(model(batch), batch).backward()
    assert counted.found >= 4


def test_a_gradient_with_other_strides_is_copied_to_those_of_the_trace() -> None:
    expected = OutputGradient(1, torch.Size([2, 3]), (1, 2), torch.float64)
    transposed, plain = torch.randn(3, 2, dtype=torch.float64).t(), torch.randn(2, 3, dtype=torch.float64)
    assert expected.of([None, transposed]) is transposed
    found = expected.of([None, plain])
    assert found.stride() == (1, 2)
    assert torch.equal(found, plain)
    zeros = expected.of([plain, None])
    assert (zeros.stride(), zeros.dtype, zeros.any().item()) == ((1, 2), torch.float64, False)
    with pytest.raises(ModelError, match=r"\[3, 2\]"):
        expected.of([plain, plain.t()])


class OfManyForms(nn.Module):
    """Weights that are used through views, several times, and as what is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.rand(WIDTH * WIDTH))
        self.deep = nn.Parameter(torch.rand(2, WIDTH // 2, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.table = nn.Embedding(5, WIDTH, padding_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0], device=x.device) % 3
        y = x @ self.flat.view(WIDTH, WIDTH) + x @ self.deep.view(WIDTH, WIDTH).t()
        y = y + x * self.scale.sum() + x * self.scale.diagonal()
        y = y + x @ self.scale + x * self.scale[0]  # a product between others
        return y + x @ self.scale.exp() + self.table(tokens)


def test_gradients_of_many_forms_are_those_of_plain_torch() -> None:
    model, batch = model_of(OfManyForms, Residual), batch_of(3)
    sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for part in batch.chunk(MICROBATCHES):
        loss = nn.functional.mse_loss(model(part), part) / MICROBATCHES
        for (_, total), one in zip(
            sums.items(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            total += one
    found = gradients_of(model, compile="graphs")
    for name, gradient in sums.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13)


def test_compiled_weights_used_twice_or_elementwise_have_the_gradients_of_torch() -> None:
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
    model = model_of(Residual, Writing)
    with pytest.raises(ModelError, match=r"layer '1' cannot be compiled.* mutations.*'where possible'"):
        gradients_of(model, compile="graphs")
    # Of this layer alone, since code is generated for others, which takes seconds.
    only = model_of(Writing)
    with pytest.warns(UserWarning, match=r"layer '0' cannot be compiled.* mutations.*runs eagerly"):
        found = gradients_of(only, compile="where possible")
    assert_same_bits(found, gradients_of(only))


class Counting(nn.Linear):
    """Counts its runs in an attribute, by which it divides."""

    runs = 0

    def forward(self, input: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(input) / self.runs


def test_a_layer_that_counts_its_runs_is_not_compiled() -> None:
    model = nn.Sequential(Counting(WIDTH, WIDTH)).double()
    with pytest.raises(
        ModelError, match=r"^the layer '0' cannot be compiled, for each run changes runs, which graphs"
    ):
        gradients_of(model, compile="graphs")
    with pytest.warns(UserWarning, match="each run changes runs"):
        found = gradients_of(model, compile="where possible")
    assert_same_bits(found, gradients_of(model))


def test_a_layer_for_which_no_code_can_be_generated_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of other layers' code their operations run."""
    asked: list[Any] = []

    def refusing(graph: Any) -> Any:
        asked.append(graph)
        if any(node.target == torch.ops.aten.tanh.default for node in graph.graph.nodes):
            raise RuntimeError("no kernel for tanh")
        return run_operations(graph)

    monkeypatch.setattr("plait.engine.compilation.graphs_and_eager_operations.with_generated_code", refusing)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    with pytest.raises(ModelError, match=r"layer '1' cannot be compiled, for torch says: no kernel for tanh"):
        gradients_of(model, compile=True)
    asked.clear()
    with pytest.warns(UserWarning, match=r"layer '1' cannot .*no kernel for tanh It runs eagerly") as told:
        found = gradients_of(model, compile="where possible")
    assert_same_bits(found, gradients_of(model))
    assert len(told) == 1
    assert len(asked) == 2 + 1 + 2, "the tanhs are tried once, and the linears are compiled"


class Attentive(nn.Module):
    """Attention of one head, with an embedding of positions."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(8, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0 if self.window is None else 0.5)

    def forward(self, x: Tensor) -> Tensor:
        given = x + self.position(plait.positions(x))
        query, key = self.query(given).unsqueeze(1), self.key(given).unsqueeze(1)
        mixed = plait.attention(query, key, x.unsqueeze(1), window=self.window, dropout=self.drop)
        return mixed.squeeze(1)


def sequences_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * MICROBATCHES, 8, WIDTH, dtype=torch.float64, generator=generator)


def test_one_compiled_graph_serves_all_document_lengths(traced: list[str]) -> None:
    """Other documents in each step, in one of which each row is a single one."""
    ids = [torch.arange(8).div(size, rounding_mode="floor").expand(2 * MICROBATCHES, 8) for size in (8, 3, 2)]

    def gradients_after(compile: Any) -> list[dict[str, Tensor]]:
        engine, found = engine_of(model_of(Attentive, Attentive), compile=compile), []
        for seed, one in enumerate(ids):
            x = sequences_of(seed)
            engine.forward_backward({"x": x, "document_ids": one}, x)
            found.append({name: gradient.clone() for name, gradient in engine.named_gradients()})
        return found

    eager = on_one_rank(partial(gradients_after, False))
    assert traced == []
    compiled = on_one_rank(partial(gradients_after, "graphs"))
    assert traced == ["0", "1"]
    for found, expected in zip(compiled, eager, strict=True):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13)


class Windowed(Attentive):
    """Whose weights drop out."""

    window = 3


@pytest.mark.parametrize("recompute", in_quick(("none", "selective", "full"), "selective"))
def test_compiled_attention_in_blocks_draws_new_dropout_masks_in_each_step(recompute: Any) -> None:
    def gradients_after(compile: Any) -> list[Tensor]:
        engine, x, found = (
            engine_of(model_of(Windowed), compile=compile, recompute=recompute),
            sequences_of(0),
            [],
        )
        for _ in range(2):
            engine.forward_backward(x, x)
            for _, gradient in engine.named_gradients():
                found.append(gradient.clone())
                gradient.zero_()
        return found

    eager, compiled = (on_one_rank(partial(gradients_after, compile)) for compile in (False, "graphs"))
    for found, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert not torch.equal(eager[0], eager[len(eager) // 2])


def test_each_compiled_step_checks_its_document_ids() -> None:
    """Rows may be longer than the model's context, documents may not."""

    def run() -> None:
        plan = plait.Plan(compile="graphs")
        model = plait.models.gpt2(layers=1, hidden=8, heads=1, vocab=9, context=4)
        engine = plait.parallelize(model, plan, plait.Mesh(plan), plait.cross_entropy)
        for size in (4, 3, 5):
            ids = torch.arange(8).div(size, rounding_mode="floor").expand(2, 8)
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            if size > 4:
                with pytest.raises(ModelError, match="5 tokens is longer than the model's context of 4"):
                    engine.forward_backward({"tokens": tokens, "document_ids": ids}, tokens)
            else:
                engine.forward_backward({"tokens": tokens, "document_ids": ids}, tokens)

    on_one_rank(run)


def test_an_unknown_value_of_plan_compile_is_refused() -> None:
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
def test_generated_code_differs_from_eager_by_rounding_only() -> None:
    model = model_of(Residual, Residual, Residual)
    found, expected = gradients_of(model, compile=True), gradients_of(model)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(gradient.abs().max(), 1e-3 * largest)
        assert (found[name] - gradient).abs().max() <= 1e-13 * scale, name
