"""A steady step does not make the host wait for its GPU: counted on CPU tensors, as if they were on one.

Two halves: what a step reads of tensors' values is seen by a dispatch mode; what reads memory without an
operation (`tolist`, `numpy`, `cpu`) is looked for in the text of the rooms that run in a step.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from parity import woven
from parity.cases import gpt2, sparse_llama
from plait.app.config.config import Config
from plait.app.loop import training_loop as training
from plait.app.loop.training_loop import TrainingLoop
from plait.app.train.train_run import train
from plait.engine.cuda_graphs import host_reads
from plait.engine.sharding import gradient_norm
from plait.plan.plan import Plan
from plait.tensor import losses as softmax_terms
from plait.tensor.parallel.embedding_and_norm import VocabParallelEmbedding

SOURCE = Path(plait.__file__).parent
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2")
"""Operations whose result, or its shape, the host needs."""


class HostReads(TorchDispatchMode):
    """Counts the operations that would make the host wait, by the function of plait that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in READS:
            where = caller(sys._getframe(1))
            if not where.startswith("ranks/transport/threads/"):  # these compare inputs, a GPU does not
                self.places[where] += 1
        return func(*args, **(kwargs or {}))


def caller(frame: FrameType | None) -> str:
    """The innermost function of plait, or the test itself."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            return f"{path.relative_to(SOURCE)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "user"


def steady_step(plan: Plan, clip: float) -> Counter[str]:
    """The third step of a run on this rank."""
    case = gpt2(layers=1) if plan.linears is None else gpt2(layers=1, hidden=64, heads=4)
    engine = woven.weave(case, plan)
    optimizer = torch.optim.SGD(engine.parameter_groups(weight_decay=0.1), lr=1e-3)  # Adam counts on the CPU
    batches = woven.shares(case, engine, 1)
    for _ in range(2):
        engine.forward_backward(*batches[0])
        engine.step(optimizer, clip)
    with HostReads() as reads:
        engine.forward_backward(*batches[0])
        engine.step(optimizer, clip)
    return reads.places


PLANS = {
    "none": Plan(pp=2, tp=2, dp=2, microbatches=2, precision="fp32"),
    "full": Plan(pp=2, tp=2, dp=2, strategy="full", schedule="zb-v", microbatches=4, precision="fp32"),
    "bf16": Plan(pp=2, dp=2, strategy="full", reduce="each", microbatches=2, precision="bf16"),
    "recomputed": Plan(
        tp=2, sequence_parallel="regather", recompute="full", microbatches=2, precision="fp32"
    ),
    "float8": Plan(tp=2, dp=2, strategy="full", linears="float8", microbatches=2, precision="bf16"),
}


@pytest.fixture(autouse=True)
def _checks_of_values_are_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and targets are looked at where that costs no wait."""
    monkeypatch.setattr(VocabParallelEmbedding, "_require_known", lambda *_: None)
    for module in (softmax_terms, gradient_norm):
        monkeypatch.setattr(module, "is_accelerator", lambda where: True)


@pytest.mark.parametrize("name", PLANS)
def test_a_steady_step_reads_no_tensor_on_the_host(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(woven.DTYPES, "bf16", torch.float32)
    for places in thread_ranks.run(steady_step, PLANS[name], 1.0, ranks=PLANS[name].world):
        assert not places


def reads_in_a_step_of_experts(plan: Plan) -> list[str]:
    """Also calls that read memory without an operation."""
    case = sparse_llama(layers=1, wide=True, experts=4, shared=32)
    engine = woven.weave(case, plan)
    optimizer = torch.optim.SGD(engine.parameters(), lr=1e-3)
    ((inputs, targets),) = case.batches(4, 1, torch.float32)
    engine.forward_backward(inputs, targets)  # may compile
    with host_reads.HostReads() as reads:
        engine.forward_backward(inputs, targets)
        engine.step(optimizer, 1.0)
    return [one for one in reads.reads if one != "Tensor.numpy"]  # of the batch, in CPU memory: its hash


@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}, {"compile": "graphs"}], ids=str)
def test_a_step_of_experts_of_which_each_rank_has_all_reads_nothing_on_the_host(
    thread_ranks: Any, fields: dict[str, Any]
) -> None:
    """Where one kernel multiplies all of them, as in fp32 on a CPU, and in bf16 on a GPU."""
    plan = Plan(microbatches=2, precision="fp32", **fields)
    assert thread_ranks.run(reads_in_a_step_of_experts, plan, ranks=1) == [[]]


def test_a_step_with_a_dynamic_loss_scale_reads_one_tensor_on_the_host(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether gradients have overflowed decides the next scale."""
    monkeypatch.setitem(woven.DTYPES, "fp16", torch.float32)
    plan = Plan(pp=2, dp=2, microbatches=2, precision="fp16", master_precision="fp32")
    for places in thread_ranks.run(steady_step, plan, 1.0, ranks=plan.world):
        assert sum(places.values()) <= 1, places


def test_a_steady_step_of_plait_train_reads_no_tensor_on_the_host(
    thread_ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its metrics, clipping and signals to stop, read a step late as on a GPU."""
    found: list[Counter[str]] = []
    run_step = TrainingLoop.run_step

    def counted(self: TrainingLoop) -> None:
        step = self.done
        with HostReads() as reads:
            run_step(self)
        if 2 <= step < 5:
            found.append(reads.places)

    monkeypatch.setattr(training, "is_accelerator", lambda device: True)
    monkeypatch.setattr(TrainingLoop, "run_step", counted)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)  # it counts its steps on the CPU
    sections = {
        "model": {"layers": 2, "hidden": 16, "heads": 2, "context": 16},
        "train": {"steps": 6, "batch": 4, "microbatches": 2, "validate_batches": 1},
        "parallel": {"pp": 2, "dp": 2, "strategy": "full"},
        "run": {"dir": tmp_path, "compare": 0, "tensorboard": False},
    }
    thread_ranks.run(train, Config.model_validate(sections), ranks=4)
    assert len(found) == 3 * 4
    assert not any(found), found


def test_float_and_bool_of_a_tensor_are_counted_as_host_reads() -> None:
    with HostReads() as reads:
        float(torch.ones(()))
        bool(torch.ones(()) > 0)
    assert reads.places == {"user": 2}


# ── without an operation ──

ROOMS = (
    "engine/runner.py",
    *(
        "engine/pipeline",
        "engine/sharding",
        "engine/cuda_graphs",
        "tensor",
        "models/layers",
        "proof",
        "ranks",
    ),
    *("app/loop", "app/train"),
)
READING = ("tolist", "numpy", "cpu", "item")
MAKING = ("tensor", "as_tensor")
ALLOWED = {
    "ranks/consistency_check.py": "headers are in CPU memory with Gloo; guards and loads ask for hashes",
    "ranks/json_serialization.py": "results of a launch, once, after the ranks have ended",
    "ranks/launch/result_all_gather.py": "the same",
    "ranks/text_collectives.py": "texts are exchanged at the start, on saves and for errors",
    "ranks/transport/shared_memory/host_discovery.py": "once per mesh",
    "ranks/transport/shared_memory/transport.py": "where parts begin, in the CPU memory that ranks share",
    "models/layers/layer_sequence.py": "a hash of the model's values, once",
    "engine/sharding/gradient_norm.py": "the factor of a clipped gradient that is offloaded to the CPU",
    "proof/optimizer_proof.py": "once per optimizer, on CPU tensors of its own",
    "engine/sharding/replica_check.py": "of guards, which are asked for",
    "ranks/accelerator.py": "the room that the others ask",
    "tensor/attention/attention.py": "documents given to `attention` itself, once for each micro-batch",
    "tensor/attention/key_exchange_plan.py": "positions of a layout, once for each layout",
    "tensor/attention/kernel_calls.py": "bounds of documents, which are on the CPU",
    "tensor/attention/visible_keys.py": "bounds of documents, which are on the CPU",
    "tensor/experts/grouped_products.py": "sizes of groups, where no kernel multiplies them without the host",
    "tensor/experts/router_losses_of_step.py": "counts of the step before, on saves",
    "tensor/experts/token_exchange.py": "rows to send and receive, once a layer and micro-batch",
    "tensor/sampling.py": "generation draws tokens on the CPU",
    "app/loop/meter.py": "the numbers of a step, read after the next one was submitted",
    "app/loop/rank_times.py": "the times of all ranks, read after the next step was submitted",
    "app/loop/stream.py": "what the rank that reads has read, on the way between CPUs",
    "app/loop/validation.py": "the means of a validation",
    "tensor/direct_preference.py": "answers of a reference, computed once before the training",
    "app/train/one_rank_comparison.py": "after the run, on rank 0",
    "app/train/run_data.py": "the tokens of a prompt, in NumPy, before the run",
    "app/train/trainer.py": "the sample after the run",
}
"""Files that read values of tensors, or copy from pageable memory, and why they may."""


def copies(path: Path) -> Iterator[int]:
    """The lines of a file that read a tensor, or copy one to another device, without the device room."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, options = node.func.attr, [option.arg for option in node.keywords]
            moves = name == "to" and any("device" in ast.unparse(one) for one in node.args)
            if name in READING or moves or (name in MAKING and "device" in options):
                yield node.lineno


def test_only_listed_files_read_tensor_values_on_the_host() -> None:
    rooms = [SOURCE / room for room in ROOMS]
    paths = [path for room in rooms for path in ([room] if room.is_file() else room.rglob("*.py"))]
    found = {str(path.relative_to(SOURCE)) for path in paths if any(copies(path))}
    assert found == set(ALLOWED)
