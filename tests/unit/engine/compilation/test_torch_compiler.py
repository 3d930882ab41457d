"""What compiled layers rely on in torch: a graph of forward and backward, in which nothing is written to."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from plait.engine.compilation.torch_compiler import (
    code_cache,
    example_of,
    is_random,
    is_view,
    joint_graph,
    move_to_meta,
    with_generated_code,
    without_memory,
)
from plait.errors import PlanError


def function(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Written to in place, in two results, of which one requires no gradient."""
    product = (input @ weight.t()).mul_(2.0)
    return product.relu_(), input.detach() + 1


def arguments() -> list[Tensor]:
    with without_memory():
        return [torch.empty(3, 4), torch.empty(5, 4, requires_grad=True)]


def test_a_traced_graph_gives_the_results_and_gradients_of_the_module() -> None:
    graph = joint_graph(function, arguments(), differentiates=True)
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert [tuple(example_of(node).shape) for node in given] == [(3, 4), (5, 4), (3, 5)]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    assert len(output.args[0]) == 4
    assert output.args[0][2] is None  # the input requires no gradient
    input, weight, gradient = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.randn(3, 5)
    results = function(input, weight)
    results[0].backward(gradient)
    interpreted = torch.fx.Interpreter(graph)
    made = interpreted.run(input, weight.detach(), gradient, enable_io_processing=False)
    assert all(map(torch.equal, made[:2], results))
    assert weight.grad is not None
    assert torch.equal(made[3], weight.grad)


def test_a_traced_graph_modifies_no_input() -> None:
    graph = joint_graph(function, arguments(), differentiates=True)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called
    assert not any(one._schema.is_mutable for one in called if one is not operator.getitem)


def test_a_graph_traced_without_gradients_is_the_forward() -> None:
    with without_memory():
        given = [torch.empty(3, 4), torch.empty(5, 4)]
    graph = joint_graph(function, given, differentiates=False)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    assert len(output.args[0]) == 2


def test_views_and_random_operations_of_a_graph_are_recognised() -> None:
    def several(input: Tensor) -> tuple[Tensor, ...]:
        return (torch.nn.functional.dropout(input.t().reshape(2, 6), 0.5).exp(),)

    with without_memory():
        graph = joint_graph(several, [torch.empty(3, 4, requires_grad=True)], differentiates=True)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert any(is_view(node) and node.target == torch.ops.aten.t.default for node in nodes)
    assert any(is_random(node) for node in nodes)
    assert not any(is_view(node) for node in nodes if node.target == torch.ops.aten.exp.default)


def test_a_graph_moved_to_meta_makes_its_tensors_there() -> None:
    def several(input: Tensor) -> tuple[Tensor, ...]:
        return (input + torch.arange(4, device=input.device, dtype=torch.float32),)

    with without_memory():
        graph = joint_graph(several, [torch.empty(3, 4)], differentiates=False)
    move_to_meta(graph)
    (made,) = torch.fx.Interpreter(graph).run(torch.empty(3, 4, device="meta"), enable_io_processing=False)
    assert made.is_meta


def test_a_graph_runs_as_it_is_where_nothing_is_to_be_generated() -> None:
    graph, x = torch.fx.Graph(), torch.ones(2)
    graph.output((graph.placeholder("x"),))
    (node, _) = graph.nodes
    with without_memory():
        node.meta["val"] = torch.empty(2)
    (made,) = with_generated_code(torch.fx.GraphModule({}, graph))([x])
    assert torch.equal(made, x)


def calls_of_functions(run: Callable[[], object]) -> int:
    """How many Python functions `run` calls."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, _: events.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return events.count("call")


def product_of(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Only a product, for which no kernel has to be built."""
    product = x @ weight
    return product, product.t()


@torch.no_grad()
def test_generated_code_is_called_without_the_wrappers_around_it() -> None:
    """Also when torch's caches know the graph, and with arguments that require gradients."""
    x, weight = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    for _ in range(2):
        hits = counters["inductor"]["fxgraph_cache_hit"]
        with without_memory():
            examples = [torch.empty(3, 4), torch.empty(4, 5, requires_grad=True)]
        run = with_generated_code(joint_graph(product_of, examples, differentiates=False))
        arguments = [x, weight]
        made, transposed = run(arguments)
        assert torch.equal(made, x @ weight)
        assert torch.equal(transposed, made.t())
        assert arguments == [], "the code lets go of what it has read"
        assert calls_of_functions(partial(run, [x, weight])) == 1
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1, "torch keeps the code on the disk"


def test_the_folder_of_generated_code_is_the_one_that_torch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    assert code_cache() == tmp_path / "code"
    assert code_cache().is_dir()


@pytest.mark.parametrize("about", ["own", "open to others", "of another user"])
def test_code_that_another_user_could_have_written_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: str
) -> None:
    """torch's default is a name in the folder for temporary files, which anybody can take first."""
    folder = tmp_path / "torchinductor_somebody"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    if about == "own":
        assert code_cache() == folder
        return
    if about == "open to others":
        folder.chmod(0o777)
    elif os.getuid():
        pytest.skip("only root gives files to another user")
    else:
        os.chown(folder, 65534, -1)
    with pytest.raises(PlanError, match="is open to other users: remove it, or set TORCHINDUCTOR_CACHE_DIR"):
        code_cache()
