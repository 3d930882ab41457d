"""LoRA is that of peft: values, gradients, merged weights and files, on ranks that divide everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plait
from parity import huggingface_cases as cases
from parity.norm import assert_close, assert_equal
from plait.plan.plan import Plan
from plait.ranks.launch.rank_pool import RankPool

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

EVERYTHING = Plan(
    pp=2, tp=2, dp=2, strategy="full", reduce="each", schedule="zb-h1", microbatches=2, precision="fp64"
)
RATE = 0.5
ROWS = 8
FAMILIES = [
    "phi3",  # whose linears are several in one, of unequal sizes
    pytest.param("llama", marks=pytest.mark.full),
    pytest.param("gpt2", marks=pytest.mark.full),
    pytest.param("gpt-neox", marks=pytest.mark.full),
]


def peft_model(name: str, **options: Any) -> Any:
    """The model with peft's own adapters, of which none begins at zero."""
    peft = pytest.importorskip("peft")
    settings = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "init_lora_weights": False}
    config = peft.LoraConfig(**{**settings, "task_type": "CAUSAL_LM", **options})
    model = cases.drawn(cases.MODELS[name])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return peft.get_peft_model(model, config)


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = cases.draw_contexts(cases.GPT2_VOCAB)(ROWS, torch.Generator().manual_seed(3))
    return inputs, targets


def their_step(model: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step, after which the adapters have moved along them."""
    inputs, targets = batch()
    loss = functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for one in trained.values():
            one.sub_(one.grad, alpha=RATE)
    return float(loss.detach()), {name: one.grad.clone() for name, one in trained.items()}


def woven_step(name: str, folder: Path, target: Path) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: the loss, the gradients by the names of peft, and the merged weights after the step."""
    model = plait.models.from_huggingface(cases.drawn(cases.MODELS[name]))
    plain = dict(model.huggingface_names)
    plait.models.load_adapter(model, folder)
    mesh = plait.Mesh(EVERYTHING)
    engine = plait.parallelize(model, EVERYTHING, mesh, plait.cross_entropy)
    rows = ROWS // EVERYTHING.dp
    mine = slice(mesh.index("dp") * rows, (mesh.index("dp") + 1) * rows)
    inputs, targets = batch()
    loss = engine.forward_backward(inputs[mine], targets[mine]).item()
    gradients = {key: one.clone() for key, one in engine.named_gradients()}
    torch.optim.SGD(engine.parameters(), lr=RATE).step()
    values = engine.state_dict(everywhere=True)
    if mesh.rank == 0:
        plait.models.save_adapter(model, target, values)
    merged = plait.models.merged_values(model, values)
    names = {key: value.removesuffix(".weight") for key, value in model.huggingface_names.items()}
    renamed = {}
    for key, gradient in gradients.items():
        path, half, _ = key.rsplit(".", 2)
        letter = {"down": "A", "up": "B"}[half]
        renamed[f"base_model.model.{names[f'{path}.base.weight']}.lora_{letter}.default.weight"] = gradient
    return loss, renamed, {plain[key]: value for key, value in merged.items() if key in plain}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step_of_adapters_is_that_of_peft(
    thread_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    theirs = peft_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    loss, gradients = their_step(theirs)
    answers = thread_ranks.run(
        woven_step, name, tmp_path / "theirs", tmp_path / "ours", ranks=EVERYTHING.world
    )
    adapters = {key: one.detach().clone() for key, one in theirs.named_parameters() if "lora_" in key}
    weights = theirs.merge_and_unload().state_dict()
    for found, found_gradients, merged in answers:
        assert_close(found, loss, 1e-12, "the loss")
        assert_equal(found_gradients, gradients, 1e-12, "the gradient")
        assert_equal(merged, {key: weights[key] for key in merged}, 1e-12, "the merged weight")
    again = read_by_peft(name, tmp_path / "ours")
    assert_equal(again, adapters, 1e-12, "the value")


def read_by_peft(name: str, folder: Path) -> dict[str, Tensor]:
    """The adapters in a folder, as peft reads them beside the model."""
    import peft

    model: nn.Module = peft.PeftModel.from_pretrained(cases.drawn(cases.MODELS[name]), folder)
    return {key: one.detach() for key, one in model.named_parameters() if "lora_" in key}
