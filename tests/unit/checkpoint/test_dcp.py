"""To torch.distributed.checkpoint and back: bit by bit, a shard at a time, and nothing in a file is run."""

from __future__ import annotations

import io
import json
import pickle
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import plait
from parity.checkpoints import Run, run_of, tensors_of
from plait.checkpoint import dcp as dcp_planner
from plait.checkpoint.compatibility import require_same_class
from plait.checkpoint.dcp import export_dcp, import_dcp
from plait.checkpoint.dcp_reader import DcpReader
from plait.checkpoint.file_system_calls import Disk
from plait.checkpoint.manifest import FILE, Manifest, TensorEntry, manifest_text, read_manifest
from plait.checkpoint.optimizer_set import OptimizerSet
from plait.checkpoint.tensor_file import BoxToWrite, TensorFileReader, write_file
from plait.errors import CheckpointError
from plait.plan.layout import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PLAN = plait.Plan(microbatches=4, precision="fp64")
Cuts = Mapping[str, tuple[Tensor, list[Box]]]


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit by bit."""

    def told(tensor: Tensor) -> tuple[object, ...]:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return tensor.dtype, tensor.shape, data.numpy().tobytes()

    return one.keys() == other.keys() and all(told(one[name]) == told(other[name]) for name in one)


def saved(folder: Path) -> Path:
    """A native checkpoint of a run of two steps."""
    with run_of(PLAN) as run:
        run.train(range(2))
        plait.save(run.engine, run.optimizer, folder / "native", {"step": 2})
    return folder / "native"


def cuts() -> Cuts:
    """Tensors in boxes: several, one, none."""
    whole = torch.arange(20, dtype=torch.float32).reshape(5, 4)
    bfloat = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    return {
        "model.layer.weight": (whole, [Box((0, 0), (2, 4)), Box((2, 0), (3, 1)), Box((2, 1), (3, 3))]),
        "model.bfloat": (bfloat, [Box((0, 0, 0), (3, 1, 2)), Box((0, 1, 0), (3, 1, 2))]),
        "model.flags": (torch.tensor([True, False, True]), [Box((0,), (3,))]),
        "model.empty": (torch.empty(0, 3), []),
        "optim.state.layer.weight.exp_avg": (-whole, [Box((0, 0), (4, 4)), Box((4, 0), (1, 4))]),
        "optim.state.layer.weight.step": (torch.tensor(7.0), [Box((), ())]),
    }


def cut(folder: Path, tensors: Cuts, **others: Any) -> Path:
    """A native checkpoint of these, in two files."""
    items = [
        BoxToWrite(name, box, whole.dtype, lambda whole=whole, box=box: whole[box.slices])
        for name, (whole, boxes) in tensors.items()
        for box in boxes
    ]
    place = folder / "native"
    place.mkdir(parents=True)
    files = tuple(
        write_file(place / f"rank-0000{rank}.safetensors", items[rank::2], Disk()) for rank in range(2)
    )
    known = {
        name: TensorEntry(tuple(whole.shape), str(whole.dtype)[6:]) for name, (whole, _) in tensors.items()
    }
    (place / FILE).write_text(manifest_text(Manifest(known, files, **others)))
    return place


def wholes(tensors: Cuts) -> dict[str, Tensor]:
    return {name: whole for name, (whole, _) in tensors.items()}


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    one = model()
    groups = [{"params": [*one[0].parameters()], "lr": 0.5}, {"params": [*one[1:].parameters()]}]
    optimizer = kind(groups, lr=0.1, **options)
    for _ in range(2):
        one(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return one, optimizer


def by_torch(folder: Path, flat: bool = False) -> tuple[Path, dict[str, Any]]:
    """What torch writes of a model and its AdamW."""
    one, optimizer = trained(torch.optim.AdamW)
    told = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, of_optimizer = get_state_dict(one, optimizer, options=told)
    whole = {"model": state, "optim": of_optimizer}
    distributed.save(whole, checkpoint_id=folder / "torch", no_dist=True)
    return folder / "torch", whole


def test_a_checkpoint_exported_to_dcp_and_imported_has_the_same_bits(tmp_path: Path) -> None:
    native = saved(tmp_path)
    export_dcp(native, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert equal(tensors_of(native), tensors_of(tmp_path / "back"))
    before, after = read_manifest(native), read_manifest(tmp_path / "back")
    for part in ("optimizer", "run", "state", "plan", "aliases"):
        assert getattr(before, part) == getattr(after, part), part
    assert after.aliases == {"head.output.weight": "embedding.token.weight"}
    assert len(after.files) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "dcp", "native"]
    with run_of(PLAN, seed=9) as run:
        assert plait.load(run.engine, run.optimizer, tmp_path / "back") == {"step": 2}
        run.train(range(2, 3))
        losses = run.losses
    with run_of(PLAN, seed=9) as run:
        plait.load(run.engine, run.optimizer, native)
        run.train(range(2, 3))
        assert run.losses == losses


def test_torch_loads_tensors_of_several_boxes(tmp_path: Path) -> None:
    native = cut(tmp_path, cuts())
    export_dcp(native, tmp_path / "dcp")
    into = {name: torch.full_like(whole, 1) for name, whole in wholes(cuts()).items()}
    distributed.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(into, wholes(cuts()))
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert equal(tensors_of(tmp_path / "back"), wholes(cuts()))
    assert read_manifest(tmp_path / "back").optimizer == {
        "class": "",
        "groups": [],
        "group_of": {},
        "plain": {},
    }


def test_torch_reads_an_exported_checkpoint_as_nested_dictionaries(tmp_path: Path) -> None:
    optimizer = {
        "class": "AdamW",
        "groups": [{"lr": 0.5, "betas": [0.9, 0.99]}, {"lr": 0.1, "betas": [0.9, 0.99]}],
        "group_of": {"layer.weight": 1, "bfloat": 0},
        "plain": {"bfloat": {"restarts": 3}},
    }
    native = cut(tmp_path, cuts(), optimizer=optimizer, state={"step": 4})
    export_dcp(native, tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole.keys() == {"model", "optim", "plait"}
    assert whole["model"].keys() == {"layer.weight", "bfloat", "flags", "empty"}
    assert torch.equal(whole["model"]["layer.weight"], cuts()["model.layer.weight"][0])
    assert whole["optim"]["state"]["layer.weight"]["step"] == 7
    assert whole["optim"]["state"]["bfloat"] == {"restarts": 3}
    assert whole["optim"]["param_groups"] == [
        {"lr": 0.5, "betas": (0.9, 0.99), "params": ["bfloat"]},
        {"lr": 0.1, "betas": (0.9, 0.99), "params": ["layer.weight"]},
    ]
    assert json.loads(whole["plait"])["state"] == {"step": 4}
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert read_manifest(tmp_path / "back").optimizer == optimizer


def test_torch_continues_training_from_a_checkpoint_exported_to_dcp(tmp_path: Path) -> None:
    with run_of(PLAN) as run:
        run.train(range(2))
        plait.save(run.engine, run.optimizer, tmp_path / "native")
        export_dcp(tmp_path / "native", tmp_path / "dcp")
        plain, optimizer = plain_run(seed=8)
        state, of_optimizer = get_state_dict(plain, optimizer)
        whole = {"model": state, "optim": of_optimizer}
        distributed.load(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)
        set_state_dict(plain, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
        saved_groups = [group["lr"] for group in run.optimizer.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == saved_groups
        theirs = dict(plain.named_parameters())
        for name, shard in run.engine.named_parameters():
            assert torch.equal(theirs[name], shard), name
            for key, value in run.optimizer.state[shard].items():
                assert torch.equal(optimizer.state[theirs[name]][key], value), (name, key)


def plain_run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of the runs, as torch alone has it."""
    torch.manual_seed(seed)
    plain = plait.models.gpt2(layers=1, hidden=24, heads=6, vocab=29, context=6).double()
    plain.to_empty(device="cpu")
    plain.get_submodule("head.output").weight = plain.get_submodule("embedding.token").weight  # as before
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    apart = [[p for p in plain.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    groups = [{"params": apart[0], "weight_decay": 0.1}, {"params": apart[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)
    return plain, optimizer


@pytest.mark.parametrize("flat", [False, True])
def test_import_dcp_reads_what_torch_wrote(tmp_path: Path, flat: bool) -> None:
    source, whole = by_torch(tmp_path, flat)
    import_dcp(source, tmp_path / "native")
    found, manifest = tensors_of(tmp_path / "native"), read_manifest(tmp_path / "native")
    expected = {f"model.{name}": tensor for name, tensor in whole["model"].items()}
    if flat:
        states = {key: one for key, one in whole["optim"].items() if key.startswith("state.")}
        expected |= {f"optim.{key}": one for key, one in states.items()}
    else:
        expected |= {
            f"optim.state.{name}.{key}": one
            for name, state in whole["optim"]["state"].items()
            for key, one in state.items()
        }
    assert equal(found, expected)
    told = manifest.optimizer
    assert told is not None
    assert told["class"] == ""
    assert [group["lr"] for group in told["groups"]] == [0.5, 0.1]
    assert told["group_of"] == {
        "0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1, "2.weight": 1, "2.bias": 1
    }  # fmt: skip
    assert manifest.run == manifest.state == {}


def test_plait_continues_training_from_a_checkpoint_that_torch_wrote(tmp_path: Path) -> None:
    plain, optimizer = plain_run(seed=4)
    tokens = torch.randint(29, (4, 7), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    state, of_optimizer = get_state_dict(plain, optimizer)
    distributed.save({"model": state, "optim": of_optimizer}, checkpoint_id=tmp_path / "torch", no_dist=True)
    import_dcp(tmp_path / "torch", tmp_path / "native")
    theirs = dict(plain.named_parameters())
    with run_of(PLAN, seed=9) as run:
        assert plait.load(run.engine, run.optimizer, tmp_path / "native") == {}
        for name, shard in run.engine.named_parameters():
            assert torch.equal(theirs[name], shard), name
            for key, value in optimizer.state[theirs[name]].items():
                assert torch.equal(run.optimizer.state[shard][key], value), (name, key)
        assert {group["lr"] for group in run.optimizer.param_groups} == {0.125, 1e-2}
        run.train(range(1))
        with pytest.raises(CheckpointError, match="which SGD is not"):
            plait.load(run.engine, another(run), tmp_path / "native")


def another(run: Run) -> torch.optim.Optimizer:
    return torch.optim.SGD(run.engine.parameter_groups(weight_decay=0.1), lr=1.0)


def test_an_unknown_class_is_told_by_its_options() -> None:
    weight = [nn.Parameter(torch.zeros(2))]
    known = torch.optim.AdamW(weight)
    options = {key: value for key, value in known.defaults.items() if key != "decoupled_weight_decay"}
    saved_by_older = {"class": "", "groups": [options | {"initial_lr": 1.0}]}
    require_same_class(OptimizerSet((known,)), saved_by_older)
    require_same_class(OptimizerSet((torch.optim.SGD(weight),)), {"class": "", "groups": []})
    with pytest.raises(CheckpointError, match="an optimizer with amsgrad, betas"):
        require_same_class(OptimizerSet((torch.optim.SGD(weight),)), saved_by_older)


@pytest.mark.parametrize("inner", ["", "model."])
def test_import_dcp_reads_a_model_without_an_optimizer(tmp_path: Path, inner: str) -> None:
    """Also one that has a module called `model`."""
    state = {f"{inner}{name}": tensor for name, tensor in model().state_dict().items()}
    distributed.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    import_dcp(tmp_path / "torch", tmp_path / "native")
    assert equal(tensors_of(tmp_path / "native"), {f"model.{name}": one for name, one in state.items()})
    assert read_manifest(tmp_path / "native").optimizer is None


def test_import_dcp_leaves_out_entries_other_than_model_and_optimizer(tmp_path: Path) -> None:
    source = {"model": {"w": torch.ones(2)}, "random": torch.zeros(3), "step": 4, "names": {"a": ["b"]}}
    distributed.save(source, checkpoint_id=tmp_path / "torch", no_dist=True)
    import_dcp(tmp_path / "torch", tmp_path / "native")
    assert tensors_of(tmp_path / "native").keys() == {"model.w"}


class Live:
    """Bytes that were read and are still held."""

    def __init__(self) -> None:
        self.now = self.most = self.all = 0

    def watched(self, tensor: Tensor) -> Tensor:
        """A copy whose memory is counted until nobody holds it."""
        array = tensor.numpy().copy()
        self.now += array.nbytes
        self.all += array.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self.released, array.nbytes)
        return torch.from_numpy(array)

    def released(self, count: int) -> None:
        self.now -= count


def test_import_dcp_holds_one_box_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = [Box((0, 0), (8, 16)), Box((8, 0), (8, 16))]
    tensors = {f"model.{number}": (torch.full((16, 16), float(number)), halves) for number in range(6)}
    native = cut(tmp_path, tensors)
    box, live, read_box, read_chunk = 8 * 16 * 4, Live(), TensorFileReader.read, DcpReader.read
    monkeypatch.setattr(TensorFileReader, "read", lambda *told: live.watched(read_box(*told)))
    monkeypatch.setattr(dcp_planner, "FILE_BYTES", 2 * box)
    export_dcp(native, tmp_path / "dcp")
    assert live.all == 12 * box
    assert live.most <= 2 * box
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 6
    live = Live()
    monkeypatch.setattr(TensorFileReader, "read", read_box)
    monkeypatch.setattr(DcpReader, "read", lambda *told: live.watched(read_chunk(*told)))
    import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert live.all == 12 * box
    assert live.most <= 2 * box
    assert equal(tensors_of(tmp_path / "back"), wholes(tensors))


def test_an_exported_checkpoint_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    export_dcp(cut(tmp_path, cuts()), tmp_path / "dcp")
    assert str(tmp_path).encode() not in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert b"pathlib" not in (tmp_path / "dcp" / ".metadata").read_bytes()
    buffer = io.BytesIO((tmp_path / "dcp" / ".metadata").read_bytes())
    assert pickle.load(buffer).planner_data["model.bfloat"] == ("model", "bfloat")
