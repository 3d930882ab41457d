"""Checkpoints as torch's recipes write them: wrapped in further dictionaries, with transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import plait
from parity.pairs import in_quick
from plait.app.cli.main import main
from plait.checkpoint.dcp import export_dcp, import_dcp
from plait.checkpoint.full_tensors import FullTensors
from plait.checkpoint.huggingface.tensor_names import LLAMA_NAMES
from plait.checkpoint.manifest import read_manifest
from plait.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class AppState(Stateful):
    """Model and optimizer, as in torch's recipe of distributed checkpoints."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(**options)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def trained(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After two steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        output = model(inputs)
        getattr(output, "logits", output).square().sum().backward()
        optimizer.step()
    return model, optimizer


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With a module called as what stands around it may be."""
    torch.manual_seed(5)
    layers = nn.ModuleDict({"model": nn.Linear(3, 3), "optim": nn.BatchNorm1d(3)})
    return trained(nn.Sequential(layers["model"], layers["optim"]), torch.randn(4, 3))


def written(folder: Path, state: dict[str, Any]) -> Path:
    distributed.save(state, checkpoint_id=folder / "torch", no_dist=True)
    return folder / "torch"


def tensors_in(path: Path) -> dict[str, Tensor]:
    wholes = FullTensors(path)
    return {name: wholes.read(name) for name in wholes.manifest.tensors}


def require_same(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The checkpoint has all of both, and nothing else."""
    expected = {f"model.{name}": one for name, one in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        expected |= {f"optim.state.{name}.{key}": one for key, one in optimizer.state[parameter].items()}
    found = tensors_in(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    told = read_manifest(path).optimizer
    assert told is not None
    assert [group["lr"] for group in told["groups"]] == [0.1]
    assert told["group_of"] == {name: 0 for name, _ in model.named_parameters()}


STEP, SCHEDULER = torch.tensor(7), {"last_epoch": 3, "base": [0.1]}
Form = Callable[[Any, Any, AppState, AppState], dict[str, Any]]
"""What to write, of the states of a model and of its optimizer, and of both together, nested and flat."""
FORMS: dict[str, tuple[Form, tuple[str, ...]]] = {
    "recipe": (lambda model, optim, app, flat: {"app": app}, ()),
    "recipe, flat optimizer": (lambda model, optim, app, flat: {"app": flat}, ()),
    "recipe and more": (
        lambda model, optim, app, flat: {"app": app, "rng": STEP, "lr": SCHEDULER, "step": 3},
        ("rng", "lr", "step"),
    ),
    "deeper": (
        lambda model, optim, app, flat: {"a": {"b": {"model": model, "optim": optim}, "c": STEP}},
        ("a.c",),
    ),
    "apart": (
        lambda model, optim, app, flat: {"net": {"model": model}, "train": {"optimizer": optim, "s": 1}},
        ("train.s",),
    ),
    "another word": (
        lambda model, optim, app, flat: {"app": {"network": model, "optim": optim, "x": STEP}},
        ("app.x",),
    ),
    "an average beside": (
        lambda model, optim, app, flat: {
            "model": model,
            "ema": {name: one + 1 for name, one in model.items()},
            "optim": optim,
        },
        ("ema",),
    ),
    "a flat model": (
        lambda model, optim, app, flat: {**model, "optim": optim, "train_state": {"step": STEP}},
        ("train_state",),
    ),
}
"""What to write, and what is left out of it."""


@pytest.mark.parametrize("form", FORMS)
def test_import_dcp_finds_model_and_optimizer_at_any_depth(tmp_path: Path, form: str) -> None:
    model, optimizer = small()
    app, flat = AppState(model, optimizer), AppState(model, optimizer, flatten_optimizer_state_dict=True)
    make, left_out = FORMS[form]
    state = make(*get_state_dict(model, optimizer), app, flat)
    assert import_dcp(written(tmp_path, state), tmp_path / "native") == left_out
    require_same(tmp_path / "native", model, optimizer)


@pytest.mark.parametrize(
    "form",
    [
        lambda state: {"app": state},
        lambda state: {"app": {"model": state, "step": torch.tensor(1)}, "rng": torch.zeros(2)},
        lambda state: {"state_dict": state, "epoch": 4},
    ],
)
def test_import_dcp_finds_a_model_without_an_optimizer_at_any_depth(tmp_path: Path, form: Any) -> None:
    model, _ = small()
    import_dcp(written(tmp_path, form(model.state_dict())), tmp_path / "native")
    assert tensors_in(tmp_path / "native").keys() == {f"model.{name}" for name in model.state_dict()}


def test_import_dcp_takes_the_outer_model_of_two_nested_candidates(tmp_path: Path) -> None:
    """The optimizer's names fit both."""
    weights = {"weight": torch.ones(2), "inner.weight": torch.zeros(2)}
    optimizer = {"state": {"weight": {"exp_avg": torch.ones(2)}}}
    source = written(tmp_path, {"net": weights, "optim": optimizer, "average": {"weight": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"several models .under average, net, net\.inner."):
        import_dcp(source, tmp_path / "native")
    source = written(tmp_path / "again", {"net": weights, "optim": optimizer})
    import_dcp(source, tmp_path / "native")
    expected = {"model.weight", "model.inner.weight", "optim.state.weight.exp_avg"}
    assert tensors_in(tmp_path / "native").keys() == expected


def test_import_dcp_refuses_several_models_or_optimizers(tmp_path: Path) -> None:
    model, optimizer = small()
    state, of_optimizer = get_state_dict(model, optimizer)
    both = {"model": state, "optim": of_optimizer}
    unclear = {
        "has several optimizers .under a.optim, b.optim.": {"a": both, "b": both},
        "has several models .under a, b.: write the one that is meant under the key model": {
            "a": state,
            "b": state,
            "optim": of_optimizer,
        },
        "has several models .under a.model, b.model.": {"a": {"model": state}, "b": {"model": state}},
        "tensors both outside and inside of the dictionaries net": {"net": state, "step": torch.ones(1)},
        "has an optimizer of 0.weight, .* and no model with": {"optim": of_optimizer, "w": torch.ones(1)},
    }  # fmt: skip
    for number, (told, whole) in enumerate(unclear.items()):
        source = written(tmp_path / str(number), whole)
        with pytest.raises(CheckpointError, match=told):
            import_dcp(source, tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_import_dcp_names_the_optimizer_options_that_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [{"params": ["w"], "lr": 0.5, "hook": Path("a")}]
    whole = {"model": {"w": torch.ones(2)}, "optim": {"state": {}, "param_groups": groups}, "rng": 3}
    source = written(tmp_path, whole)
    assert main(["checkpoint", "import", str(source), str(tmp_path / "native"), "--format", "dcp"]) == 0
    assert capsys.readouterr().out.startswith("left out rng, optim.param_groups.0.hook\nwrote ")


SIZES: dict[str, int] = {"hidden": 8, "heads": 2, "kv_heads": 1, "inner": 12, "vocab": 11, "context": 6}


def theirs(tied: bool = False) -> Any:
    """A Llama of transformers with the constants of plait's own."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab"],
        hidden_size=SIZES["hidden"],
        intermediate_size=SIZES["inner"],
        num_hidden_layers=11,
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        max_position_embeddings=SIZES["context"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def engine_of(layers: nn.Sequential) -> tuple[Any, torch.optim.Optimizer]:
    plan = plait.Plan()
    mesh = plait.Mesh(plan, timeout=20.0)
    engine = plait.parallelize(layers, plan, mesh, loss=plait.cross_entropy)
    return engine, torch.optim.AdamW(engine.parameters(), lr=0.5)


def ours(kind: str, folder: Path, tied: bool) -> tuple[nn.Sequential, dict[str, str]]:
    """Layers with the names of plait's own Llama, or of that of transformers, and these names."""
    if kind == "own":
        return plait.models.llama(layers=11, **SIZES, tied=tied), dict(LLAMA_NAMES)
    theirs(tied).save_pretrained(folder / "hf")
    from plait.models.huggingface.pretrained import model_in

    layers = model_in(folder / "hf")
    names: dict[str, str] = layers.huggingface_names  # type: ignore[assignment]
    return layers, names


def own_name(full: str, names: dict[str, str]) -> str:
    """The name in `names` of what transformers calls `full`, in `LLAMA_NAMES` by hand."""
    for name, other in names.items():
        for number in range(11):
            if other.replace("#", str(number)) == full:
                return name.replace("#", str(number))
    raise KeyError(full)


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("kind", "tied"), in_quick(product(("own", "adapted"), (False, True)), ("adapted", False))
)
def test_a_llama_of_transformers_brings_its_moments_and_goes_back(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    """Eleven blocks: their numbers have one digit and two."""
    model, optimizer = trained(theirs(tied), torch.arange(6).view(1, 6))
    source = written(tmp_path, {"app": AppState(model, optimizer), "step": 2})
    layers, names = ours(kind, tmp_path, tied)
    option = ["--format", "dcp", "--model", "llama" if kind == "own" else str(tmp_path / "hf")]
    native, back = str(tmp_path / "native"), str(tmp_path / "back")
    assert main(["checkpoint", "import", str(source), native, *option]) == 0

    engine, of_engine = engine_of(layers)
    plait.load(engine, of_engine, native)
    shards = dict(engine.named_parameters())
    assert {group["lr"] for group in of_engine.param_groups} == {0.1}
    for full, parameter in model.named_parameters():
        shard = shards.pop(own_name(full, names))
        assert torch.equal(shard, parameter), full
        assert of_engine.state[shard].keys() == optimizer.state[parameter].keys()
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(of_engine.state[shard][key], value), (full, key)
    assert not shards

    plait.save(engine, of_engine, tmp_path / "ours", {"step": 2})
    assert main(["checkpoint", "export", str(tmp_path / "ours"), back, *option]) == 0
    fresh = theirs(tied)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(0)
    again = AppState(fresh, torch.optim.AdamW(fresh.parameters(), lr=0.5))
    whole = again.state_dict()
    distributed.load(whole, checkpoint_id=back, no_dist=True)
    again.load_state_dict(whole)
    for (full, parameter), was in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, was), full
        for key, value in optimizer.state[was].items():
            assert torch.equal(again.optimizer.state[parameter][key], value), (full, key)
    assert main(["checkpoint", "import", back, str(tmp_path / "there"), *option]) == 0
    before, after = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "there")
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    for part in ("optimizer", "aliases", "state", "plan", "run"):
        assert getattr(read_manifest(tmp_path / "ours"), part) == getattr(
            read_manifest(tmp_path / "there"), part
        ), part


def test_dcp_import_and_export_refuse_names_of_another_model(tmp_path: Path) -> None:
    model, optimizer = small()
    source = written(tmp_path, {"app": AppState(model, optimizer)})
    with pytest.raises(CheckpointError, match=r"has 0\.weight, .*, which the model of --model has not"):
        import_dcp(source, tmp_path / "native", LLAMA_NAMES)
    import_dcp(source, tmp_path / "native")
    with pytest.raises(CheckpointError, match="which the model of --model has not"):
        export_dcp(tmp_path / "native", tmp_path / "back", LLAMA_NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "torch"]
