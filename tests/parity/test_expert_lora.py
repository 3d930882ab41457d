"""LoRA on experts is that of peft: values, gradients, merged weights and files, in every division."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from parity import cases, lora_cases
from parity import huggingface_cases as families
from parity.norm import assert_close, assert_equal
from parity.parity import check_parity
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

TARGETS = ("experts.gate_up_proj", "experts.down_proj", "query", "shared.*")
CASE = lora_cases.case(cases.sparse_llama(layers=1), targets=TARGETS)
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp 2 ep 2": {"dp": 2, "ep": 2},
    "tp 2 ep 2": {"tp": 2, "ep": 2},
    "pp 2": {"pp": 2, "schedule": "zb-h1", "microbatches": 2},
    "full": {"dp": 4, "ep": 2, "strategy": "full", "reduce": "each", "microbatches": 2},
    "keep": {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": "keep"},
    "etp": {"dp": 2, "etp": 2},
    "sharded etp": {"dp": 4, "etp": 2, "strategy": "full", "reduce": "each", "microbatches": 2},
    "everything": {"pp": 2, "tp": 2, "ep": 2, "etp": 2, "dp": 2, "schedule": "zb-h1", "microbatches": 2},
    "hybrid": {"dp": 4, "replicate": 2, "etp": 2, "strategy": "optimizer"},
    "recompute": {"dp": 2, "ep": 2, "recompute": "full", "strategy": "full"},
    "compiled": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "microbatches": 2, "compile": "graphs"},
    "zero bubble": {
        **{"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "microbatches": 4},
        **{"strategy": "full", "reduce": "each"},
    },
}


@pytest.mark.parametrize(
    "name",
    [one if one == "dp 2 ep 2" else pytest.param(one, marks=pytest.mark.full) for one in PLANS],
)
def test_adapted_experts_train_as_on_one_rank(thread_ranks: RankPool, name: str) -> None:
    check_parity(thread_ranks, CASE, Plan(precision="fp64", **PLANS[name]))


RATE, ROWS = 0.5, 8
OF_PEFT = {
    "dp 2 etp 2": {"dp": 2, "etp": 2},
    "everything": {"pp": 2, "tp": 2, "ep": 2, "dp": 2, "strategy": "full", "microbatches": 2},
    "dp 2 ep 2": {"dp": 2, "ep": 2},
}
MIXTRAL = partial(families.drawn, families.MODELS["mixtral"])


def peft_model(targets: list[str]) -> Any:
    """Mixtral with peft's adapters, of which none begins at zero."""
    peft = pytest.importorskip("peft")
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(**settings, task_type="CAUSAL_LM", target_parameters=targets)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return peft.get_peft_model(MIXTRAL(), config)


def batch() -> tuple[Tensor, Tensor]:
    return families.draw_contexts(families.GPT2_VOCAB)(ROWS, torch.Generator().manual_seed(3))


def step_of_a_rank(plan: Plan, folder: Path, target: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the merged weights after a step of SGD, by the names of transformers."""
    model = plait.models.from_huggingface(MIXTRAL())
    names = dict(model.huggingface_names)
    plait.models.load_adapter(model, folder)
    mesh = plait.Mesh(plan)
    engine = plait.parallelize(model, plan, mesh, plait.cross_entropy)
    rows = ROWS // plan.dp
    mine = slice(mesh.index("dp") * rows, (mesh.index("dp") + 1) * rows)
    inputs, targets = (one[mine] for one in batch())
    loss = engine.forward_backward(inputs, targets).item()
    torch.optim.SGD(engine.parameters(), lr=RATE).step()
    values = engine.state_dict(everywhere=True)
    if mesh.rank == 0:
        plait.models.save_adapter(model, target, values)
    merged = plait.models.merged_values(model, values)
    return loss, {names[key]: one for key, one in merged.items() if key in names}


@pytest.fixture
def routers_in_float64() -> Iterator[None]:
    with families.norms_in_float64():
        yield


@pytest.mark.transformers
@pytest.mark.usefixtures("routers_in_float64")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_PEFT)
@pytest.mark.parametrize(
    "targets", [["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["experts.down_proj"]]
)
def test_a_training_step_of_adapted_experts_is_that_of_peft(
    thread_ranks: RankPool, tmp_path: Path, name: str, targets: list[str]
) -> None:
    theirs, plan = peft_model(targets), Plan(precision="fp64", **OF_PEFT[name])
    theirs.save_pretrained(tmp_path / "theirs")
    inputs, labels = batch()
    logits = theirs(input_ids=inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    with torch.no_grad():
        for one in theirs.parameters():
            if one.requires_grad:
                one.sub_(one.grad, alpha=RATE)
    answers = thread_ranks.run(step_of_a_rank, plan, tmp_path / "theirs", tmp_path / "ours", ranks=plan.world)
    adapters = {key: one.detach().clone() for key, one in theirs.named_parameters() if "lora_" in key}
    weights = theirs.merge_and_unload().state_dict()
    for found, merged in answers:
        assert_close(found, loss.item(), 1e-12, "the loss")
        assert_equal(merged, {key: weights[key] for key in merged}, 1e-12, "the merged weight")
    assert_equal(read_by_peft(tmp_path / "ours"), adapters, 1e-12, "the value")


def read_by_peft(folder: Path) -> dict[str, Tensor]:
    """The adapters in a folder, as peft reads them beside the model."""
    import peft

    model = peft.PeftModel.from_pretrained(MIXTRAL(), folder)
    return {key: one.detach() for key, one in model.named_parameters() if "lora_" in key}
