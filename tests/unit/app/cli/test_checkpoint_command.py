"""`plait checkpoint`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from types import ModuleType

import pytest
import torch

from parity.one_rank import CONTEXT, MODELS, cut, lively, saved, tensors_in
from plait.app.cli.main import main
from plait.checkpoint.inspecting import summary
from plait.checkpoint.manifest import read_manifest
from plait.models.llama import llama

MODEL = {
    "name": "llama",
    "layers": 2,
    "hidden": 24,
    "heads": 6,
    "kv_heads": 2,
    "inner": 20,
    "tied": False,
    "context": CONTEXT,
    "vocab": None,
}
HUGGINGFACE = ("--format", "huggingface")
STATE = {"step": 12, "config": {"model": MODEL}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a run of `plait train`, of three ranks, in the folder of its checkpoints."""
    saved(lively(MODELS["llama"]()), tmp_path / "whole", STATE)
    (tmp_path / "run").mkdir()
    return cut(tmp_path / "whole", tmp_path / "run" / "step-00000012")


@pytest.mark.transformers
def test_checkpoint_commands_escape_terminal_control_codes_in_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x9b2J"
    saved(lively(MODELS["llama"]()), tmp_path / "a", {evil: evil, "config": {"model": {"name": evil}}})
    assert main(["checkpoint", "inspect", str(tmp_path / "a")]) == 0
    assert (
        main(["checkpoint", "export", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "huggingface"])
        == 2
    )
    out, err = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b"} & {*out, *err}
    assert r"\x1b]0;owned" in out
    assert r"\x1b]0;owned" in err


def test_checkpoint_inspect_prints_completeness_and_state(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["checkpoint", "inspect", str(path.parent)]) == 0
    out = capsys.readouterr().out
    for told in (
        "complete by the sizes of its files; --check reads them",
        "step = 12, config = {model}",
        "plan        precision = fp64",
        "optimizer   none",
        "files       3, ",
        "plait 0.1.0, torch ",
    ):
        assert told in out
    lines = [line.split() for line in out.splitlines()]
    assert ["tensor", "shape", "dtype", "boxes", "bytes"] in lines
    assert ["model.blocks.1.attention.key.weight", "8", "×", "24", "float64", "7", "1,536"] in lines
    assert main(["checkpoint", "inspect", str(path), "--check"]) == 0
    assert "is          complete\n" in "\n".join(map(str.rstrip, capsys.readouterr().out.splitlines()))


def test_checkpoint_inspect_prints_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(path), "--check", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == STATE
    assert (told["checked"], told["flaws"], told["optimizer"]) == (True, [], None)
    assert [file["name"] for file in told["files"]] == [f"rank-{rank:05d}.safetensors" for rank in range(3)]
    assert told["bytes"] == sum(file.stat().st_size for file in path.glob("rank*"))
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert by_name["model.head.norm.weight"] == {
        "name": "model.head.norm.weight",
        "shape": [24],
        "dtype": "float64",
        "boxes": 3,
        "bytes": 192,
    }


def test_checkpoint_inspect_names_damaged_and_missing_files(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = path / "rank-00002.safetensors"
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 4
    file.write_bytes(whole)
    assert main(["checkpoint", "inspect", str(path)]) == 0  # its size is right
    assert main(["checkpoint", "inspect", str(path), "--check"]) == 1
    assert "damaged: rank-00002.safetensors has a damaged model." in capsys.readouterr().out
    file.write_bytes(whole[:-1])
    assert main(["checkpoint", "inspect", str(path)]) == 1
    assert f"damaged: {file.name} has {len(whole) - 1:,} bytes and not" in capsys.readouterr().out
    file.unlink()
    assert main(["checkpoint", "inspect", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["flaws"] == [f"{file.name} is missing"]


def test_checkpoint_convert_writes_the_same_tensors_in_files_of_a_given_size(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "one"
    assert main(["checkpoint", "convert", str(path.parent), str(target)]) == 0
    size = sum(file.stat().st_size for file in target.iterdir())
    assert capsys.readouterr().out == f"wrote {target}: 2 files, {size:,} bytes\n"
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "many"), "--file-size", "12KB"]) == 0
    assert max(file.bytes for file in read_manifest(tmp_path / "many").files) <= 12_000
    ours = tensors_in(path)
    assert all(torch.equal(value, ours[name]) for name, value in tensors_in(tmp_path / "many").items())


def test_checkpoint_convert_cuts_tensors_for_the_ranks_of_a_configuration(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [
        "--parallel.tp",
        "2",
        "--train.microbatches=2",
        "--parallel.dp",
        "2",
        "--parallel.strategy",
        "full",
    ]
    assert main(["checkpoint", "convert", *run, str(path), str(tmp_path / "target")]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'target'}: 5 files, ")
    assert not summary(tmp_path / "target", check=True).flaws
    manifest = read_manifest(tmp_path / "target")
    assert [file.name for file in manifest.files] == [f"rank-{rank:05d}.safetensors" for rank in range(4)]
    weight = "model.blocks.1.attention.value.weight"
    held = [sum(prod(box.sizes) for box in file.boxes if box.tensor == weight) for file in manifest.files]
    assert held == [16, 16, 80, 80], "half for each rank of tp, cut where the layer's buffer is"
    assert (manifest.plan["tp"], manifest.plan["strategy"]) == (2, "full")
    theirs = tensors_in(tmp_path / "target")
    assert all(torch.equal(value, theirs[name]) for name, value in tensors_in(path).items())


def test_checkpoint_convert_for_cp_cuts_state_as_for_data_parallelism(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their state is cut as that of as many data-parallel ranks."""
    held = {}
    for name, degrees in (("contexts", ("2", "2")), ("data", ("4", "1"))):
        run = ["--parallel.dp", degrees[0], "--parallel.cp", degrees[1], "--parallel.strategy", "full"]
        target = tmp_path / name
        assert main(["checkpoint", "convert", *run, str(path), str(target)]) == 0
        assert not summary(target, check=True).flaws
        boxes = (file.boxes for file in read_manifest(target).files)
        held[name] = [sorted((box.tensor, box.offsets, box.sizes) for box in one) for one in boxes]
    assert held["contexts"] == held["data"]
    assert read_manifest(tmp_path / "contexts").plan["cp"] == 2
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(tmp_path / "contexts")]) == 0
    assert "cp = 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (["--parallel.tp", "5"], "model.heads = 6 is not divisible by parallel.tp = 5: set"),
        (["--parallel.tp"], "--parallel.tp has no value: give a whole number of at least 1"),
        (["--parallel.pp", "9"], "9 stages need at least 9 layers, but the model has 6"),
        (["--model.layers", "3"], "of another model (missing: blocks.2.attention.norm.weight, "),
    ],
)
def test_checkpoint_convert_refuses_an_impossible_configuration(
    run: list[str], message: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "target"), *run]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


@pytest.mark.transformers
def test_checkpoint_export_and_import_restore_the_tensors(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    form = ["--format", "huggingface"]
    assert main(["checkpoint", "export", str(path), there, *form, "--rope-base", "500"]) == 0
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (config["num_attention_heads"], config["rope_parameters"]["rope_theta"]) == (6, 500.0)
    assert main(["checkpoint", "import", there, back, *form]) == 0
    ours, theirs = tensors_in(path), tensors_in(tmp_path / "back")
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert main(["checkpoint", "import", there, f"{back}-16", *form, "--dtype", "bfloat16"]) == 0
    assert {one.dtype for one in read_manifest(tmp_path / "back-16").tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize("state", [{"config": "run.yaml"}, {"config": {"model": "small"}}, {"sizes": 3}])
def test_checkpoint_export_accepts_a_users_own_state(state: dict[str, object], tmp_path: Path) -> None:
    saved(lively(MODELS["gpt2"]()), tmp_path / "mine", state)
    there = [str(tmp_path / "mine"), str(tmp_path / "there"), "--heads", "6", "--format", "huggingface"]
    assert main(["checkpoint", "export", *there]) == 0
    run = ["--model.layers", "2", "--model.hidden", "24", "--model.heads", "6", "--parallel.tp", "2"]
    context = ["--model.context", str(CONTEXT)]
    assert main(["checkpoint", "convert", str(tmp_path / "mine"), str(tmp_path / "cut"), *run, *context]) == 0


@pytest.mark.transformers
def test_checkpoint_export_takes_a_hugging_face_folder_as_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from parity import huggingface_cases as cases
    from plait.models.huggingface.pretrained import model_in

    folder = tmp_path / "theirs"
    cases.qwen2().save_pretrained(folder)
    state = {"config": {"model": {"name": str(folder)}}}
    path, form = saved(lively(model_in(folder)), tmp_path / "ours", state), ["--format", "huggingface"]
    assert main(["checkpoint", "export", str(path), str(tmp_path / "back"), *form]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "qwen2"
    path = saved(lively(model_in(folder)), tmp_path / "untold")
    assert main(["checkpoint", "export", str(path), str(tmp_path / "no"), *form]) == 2
    assert "give the folder of that model" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(path), str(tmp_path / "b"), *form, "--model", str(folder)]) == 0


def test_checkpoint_export_and_import_with_format_dcp_call_the_dcp_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    dcp = ModuleType("plait.checkpoint.dcp")
    for name in ("export_dcp", "import_dcp"):
        setattr(dcp, name, lambda *told, name=name: (told[1].mkdir(), called.append((name, *told)), ())[-1])
    monkeypatch.setitem(sys.modules, dcp.__name__, dcp)
    for action in ("export", "import"):
        arguments = [str(tmp_path / "a"), str(tmp_path / action), "--format", "dcp"]
        assert main(["checkpoint", action, *arguments]) == 0
    assert called == [
        (f"{action}_dcp", tmp_path / "a", tmp_path / action, None) for action in ("export", "import")
    ]


def test_checkpoint_commands_refuse_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in [
        ("look x", "invalid choice: 'look' (choose from 'inspect', 'convert', 'export', 'import'); see"),
        ("inspect", "the following arguments are required: PATH; see `plait checkpoint inspect --help`."),
        ("inspect nowhere", "nowhere is no folder: give the folder of a checkpoint, or one with step-"),
        ("convert a", "the following arguments are required: TARGET; see"),
        ("convert a b --file-size 5XB", "'5XB' is not a size: give bytes, or such as 500MB or 5GB; see"),
        ("convert a b --file-size 0", "'0' is not a size"),
        ("convert a b --parallel.tp 2 --file-size 5GB", "--file-size goes with whole tensors: leave it out"),
        ("export a b", "the following arguments are required: --format; see"),
        ("export a b --format onnx", "invalid choice: 'onnx'"),
        ("import a b --format huggingface --model c", "--model goes with --format dcp: leave it out"),
        ("import a b --format dcp --model gpt2", "has several matrices where transformers' GPT-2 has one"),
        ("export a b --format dcp --rope-base 5", "--rope-base goes with --format huggingface: leave it"),
        ("export a b --format huggingface --heads 0", "'0' is not a whole number of at least 1"),
        ("export a b --format huggingface --rope-base 0", "'0' is not above 0; see"),
        ("export a b --format huggingface --rope-base x", "'x' is not a number; see"),
        ("export a b --format huggingface --rope-base inf", "'inf' is not a finite number; see"),
        ("import nowhere b --format huggingface", "nowhere has no config.json: give a folder as"),
        ("export nowhere b --format huggingface", "nowhere is no folder"),
    ]:
        monkeypatch.chdir(tmp_path)
        assert main(["checkpoint", *arguments.split()]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("plait: ")
        assert message in err
        assert err.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_checkpoint_export_refuses_a_llama_with_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"layers": 1, "hidden": 24, "heads": 6, "vocab": 29, "context": CONTEXT}
    saved(lively(llama(**sizes, inner=20, experts=3)), tmp_path / "whole", STATE)
    assert main(["checkpoint", "export", *(str(tmp_path / one) for one in ("whole", "b")), *HUGGINGFACE]) == 2
    assert "plait's own llama with experts, of which plait writes no model" in capsys.readouterr().err


def test_checkpoint_help_lists_actions_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: plait checkpoint ACTION [options]\n")
    assert main(["checkpoint", "export", "--help"]) == 0
    assert "--rope-base X" in capsys.readouterr().out
    assert main(["checkpoint"]) == 2
