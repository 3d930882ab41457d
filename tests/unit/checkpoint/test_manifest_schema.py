"""Manifests that are signed and ill formed: refused in one sentence that says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity.one_rank import MODELS, lively, saved
from plait.app.cli.main import main
from plait.checkpoint.dcp import export_dcp
from plait.checkpoint.manifest import FILE, Dtype, checksum, read_manifest
from plait.checkpoint.rewriting import convert
from plait.checkpoint.tensor_file import DTYPES
from plait.errors import CheckpointError

NAME = "model.head.norm.weight"


def signed(folder: Path, content: object) -> None:
    """Write a manifest whose checksum is right."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    told = checksum(text.encode())
    (folder / FILE).write_text(f'{{"plait_checkpoint":1,"checksum":"{told}","content":{text}}}\n')


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(lively(MODELS["llama"]()), tmp_path_factory.mktemp("form") / "native", {"step": 2})


def content_of(folder: Path) -> Any:
    return json.loads((folder / FILE).read_text())["content"]


def put(*keys: str | int, value: object) -> Callable[[Any], object]:
    """Put a value at a place."""

    def do(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return do


def box_again(offset: int, size: int) -> Callable[[Any], object]:
    """Store some elements of the first box of a vector once more, in a file of its own."""

    def do(content: Any) -> None:
        first = next(box for box in content["files"][0]["boxes"] if box[0] == NAME)
        content["files"].append({"name": "more", "bytes": 9, "header": "", "boxes": [[*first]]})
        content["files"][-1]["boxes"][0][1:4] = [offset], [size], 8

    return do


FORMS: dict[str, tuple[Callable[[Any], object], str]] = {
    "tensors are a list": (put("tensors", value=[]), "tensors: input should be a valid dictionary"),
    "state is null": (put("state", value=None), "state: input should be a valid dictionary"),
    "state has a number": (put("state", value=3), "state: "),
    "run is text": (put("run", value="x"), "run"),
    "run without passes": (put("run", value={"loss_scale": None}), "passes: field required"),
    "passes are negative": (put("run", "passes", value=-1), "passes: input should be greater"),
    "an order of numbers": (put("run", "order", value={"microbatches": 1, "rank_of": [0]}), "order: field"),
    "plan is a list": (put("plan", value=[]), "plan: "),
    "a version is a number": (put("versions", "torch", value=2), "versions.torch: "),
    "an alias of nothing": (put("aliases", value={"a": "b"}), "aliases.a: there is no tensor b"),
    "a dtype that is none": (put("tensors", NAME, "dtype", value="complex_evil"), "norm.weight.dtype: "),
    "a dtype of torch's": (put("tensors", NAME, "dtype", value="manual_seed"), "norm.weight.dtype: "),
    "a shape of text": (put("tensors", NAME, "shape", value="24"), "norm.weight.shape: "),
    "a negative shape": (put("tensors", NAME, "shape", value=[-24]), "norm.weight.shape.0: "),
    "a huge shape": (put("tensors", NAME, "shape", value=[2**40, 2**40]), "is larger than any memory"),
    "a shape of fractions": (put("tensors", NAME, "shape", value=[24.0]), "norm.weight.shape.0: "),
    "files are null": (put("files", value=None), "files: "),
    "a file without a name": (put("files", 0, "name", value=""), "names '', outside of its folder"),
    "a file outside": (put("files", 0, "name", value="../a"), "names '../a', outside of its folder"),
    "a file twice": (lambda content: content["files"].append(content["files"][0]), "is listed several times"),
    "bytes of text": (put("files", 0, "bytes", value="9"), "files.0.bytes: "),
    "a box that is short": (put("files", 0, "boxes", 0, value=["a"]), "files.0.boxes.0"),
    "a box of nothing": (put("files", 0, "boxes", 0, 0, value="x"), "a box of x, which is no tensor"),
    "a box outside": (put("files", 0, "boxes", 0, 1, value=[1, 1]), r"at \[1, 1\] that is outside"),
    "a box of other dims": (put("files", 0, "boxes", 0, 1, value=[]), "that is outside of it"),
    "a box behind the end": (put("files", 0, "boxes", 1, 3, value=10**9), "out of order"),
    "a box twice": (box_again(0, 24), r"norm.weight\[0:24\] and model.head.norm.weight\[0:24\] overlap"),
    "a part of a box twice": (box_again(23, 1), r"norm.weight\[0:24\] and .*\[23:24\] overlap"),
    "an optimizer of text": (put("optimizer", value="Adam"), "optimizer: "),
    "an optimizer without a class": (
        put("optimizer", value={"groups": [], "group_of": {}, "plain": {}}),
        "optimizer.class: field required",
    ),
    "a group that is not there": (
        put("optimizer", value={"class": "A", "groups": [], "group_of": {"a": 0}, "plain": {}}),
        "optimizer.group_of.a: there is no group 0",
    ),
}


def test_the_error_of_an_ill_formed_manifest_names_the_place(written: Path, tmp_path: Path) -> None:
    for form in FORMS:
        change, told = FORMS[form]
        content = content_of(written)
        change(content)
        signed(tmp_path, content)
        with pytest.raises(CheckpointError, match=f"manifest.json is ill formed .*{told}") as refusal:
            read_manifest(tmp_path)
        assert refusal.value.damaged
        assert "\n" not in str(refusal.value)


def test_a_manifest_with_overlapping_boxes_is_refused(written: Path, tmp_path: Path) -> None:
    """Counted by elements it was, and the other half of the tensor was whatever lay in memory."""
    content = content_of(written)
    boxes = next(file["boxes"] for file in content["files"])
    at = next(number for number, box in enumerate(boxes) if box[0] == NAME)
    half = [NAME, [0], [12], boxes[at][3], boxes[at][4]]
    boxes[at : at + 1] = [half, half]
    shutil.copytree(written, tmp_path / "a")
    signed(tmp_path / "a", content)
    with pytest.raises(CheckpointError, match=r"norm.weight\[0:12\] and .*\[0:12\] overlap"):
        convert(tmp_path / "a", tmp_path / "b")


def test_a_written_manifest_is_valid_and_may_have_unknown_fields(written: Path, tmp_path: Path) -> None:
    signed(tmp_path, content_of(written) | {"of a later plait": 1})
    assert read_manifest(tmp_path) == read_manifest(written)
    assert set(Dtype.__args__) == {str(dtype).removeprefix("torch.") for dtype in DTYPES}


def test_text_that_is_no_manifest_is_reported_as_damage(tmp_path: Path) -> None:
    for text in ["[" * 200_000, '{"plait_checkpoint":1,"content":' + "[" * 200_000, "", "1", "[]"]:
        (tmp_path / FILE).write_text(text)
        with pytest.raises(CheckpointError, match="is not what was written: take another"):
            read_manifest(tmp_path)


def test_a_state_that_is_nested_deeply_is_ill_formed(written: Path, tmp_path: Path) -> None:
    text = json.dumps(content_of(written) | {"state": {"a": "deep"}}, separators=(",", ":"))
    signed(tmp_path, text.replace('"deep"', '{"a":' * 300 + "1" + "}" * 300))
    with pytest.raises(CheckpointError, match="it is nested more than 200 times"):
        read_manifest(tmp_path)


def test_a_link_that_leads_out_of_the_folder_is_refused(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / FILE).write_bytes((written / FILE).read_bytes())
    (name,) = (file.name for file in read_manifest(written).files)
    (folder / name).symlink_to(written / name)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of its folder"):
        read_manifest(folder)
    (tmp_path / "whole").symlink_to(written)  # the folder itself may be one
    assert read_manifest(tmp_path / "whole") == read_manifest(written)


def test_a_shape_that_is_not_the_file_s_is_refused(written: Path, tmp_path: Path) -> None:
    """Or one number would be read as a whole tensor of that number."""
    shutil.copytree(written, tmp_path / "a")
    content = content_of(written)
    (name,) = (file["name"] for file in content["files"])
    data = (tmp_path / "a" / name).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[f"{NAME}[0:24]"]["shape"] = [1, 24]
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= size + 8
    text = text.ljust(max(size, -(-len(text) // 8) * 8))
    data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    (tmp_path / "a" / name).write_bytes(data)
    longer = len(text) - size
    file = content["files"][0]
    file["bytes"], file["header"] = len(data), checksum(data[: 8 + len(text)])
    for box in file["boxes"]:
        box[3] += longer
    signed(tmp_path / "a", content)
    with pytest.raises(CheckpointError, match=r"float64 \[1, 24\], where the manifest says .* \[24\]"):
        convert(tmp_path / "a", tmp_path / "b")


def test_a_dtype_that_is_not_the_file_s_is_refused(written: Path, tmp_path: Path) -> None:
    """Or numbers would be converted without a word."""
    folder = tmp_path / "native"
    shutil.copytree(written, folder)
    content = content_of(written)
    content["tensors"][NAME]["dtype"] = "int8"
    signed(folder, content)
    with pytest.raises(
        CheckpointError, match=r"as torch\.float64 \[24\], where the manifest says torch\.int8"
    ):
        convert(folder, tmp_path / "whole")
    with pytest.raises(
        CheckpointError, match=r"as torch\.float64 \[24\], where the manifest says torch\.int8"
    ):
        export_dcp(folder, tmp_path / "dcp")


@pytest.mark.parametrize("action", ["inspect", "convert", "export"])
def test_checkpoint_commands_report_an_ill_formed_manifest_in_one_sentence(
    written: Path, tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = content_of(written)
    content["tensors"][NAME]["dtype"] = "complex_evil"
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    signed(folder, content)
    more = [] if action == "inspect" else [str(tmp_path / "target")]
    more += ["--format", "huggingface"] if action == "export" else []
    assert main(["checkpoint", action, str(folder), *more]) == 2
    out, err = capsys.readouterr()
    assert "is ill formed (tensors.model.head.norm.weight.dtype: " in err
    assert (out, err.count("\n")) == ("", 1)
