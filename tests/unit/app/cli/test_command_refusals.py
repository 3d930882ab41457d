"""What no machine, file system or reader takes: one sentence, and exit code 2, before a rank is started."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from plait.app.cli import main as module
from plait.app.cli.main import main
from plait.app.config.config import LIMITS
from plait.app.config.config_parser import config_from_arguments
from plait.app.data.token_arrays import open_tokens
from plait.errors import DataError, RankError
from plait.plan.decoder_sizes import MOST_SIZE


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("plait: ")
    assert err.count("\n") == 1
    assert len(err) < 600
    return err


def test_sizes_beyond_the_limits_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for field, value, told in [
        ("model.vocab", 2**63, f"model.vocab = {2**63} is more than {MOST_SIZE}, the most that plait takes"),
        ("model.hidden", 2**40, f"model.hidden = {2**40} is more than {LIMITS['hidden']}"),
        ("model.layers", 2**40, "model.layers = 1099511627776 is more than 10000"),
        ("model.context", 2**62, "model.context = 4611686018427387904 is more than"),
        ("train.microbatches", 10**6, "train.microbatches = 1000000 is more than 65536"),
        ("train.microbatches", 10**4000, "train.microbatches = about 2^13287 is more than 65536"),
        ("train.batch", 2**31, "train.batch = 2147483648 is more than 2147483647"),
        ("run.timeout", 10**7, "run.timeout = 1e+07 is more than 1000000 seconds"),
        ("parallel.tp", 2**40, "parallel.tp = 1099511627776 is more than 65536"),
        ("parallel.cp", 2**40, "parallel.cp = 1099511627776 is more than 65536"),
        ("parallel.pp", 2**16, "parallel.pp = 65536 times parallel.dp = 1 times parallel.tp = 1 needs 65536"),
    ]:
        assert told in refused(["train", f"--{field}", str(value)], capsys)
        if field != "parallel.pp":
            assert told in refused(["verify", f"--{field}", str(value)], capsys)


@pytest.mark.parametrize("field", ["model.name", "data.source", "data.tokenizer", "run.dir", "run.resume"])
@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("a" * 5000, "which is longer than file systems take (255 bytes a name)"),
        ("a/" * 2500, "which is longer than file systems take"),
        ("a\0b", "which has a zero byte in it"),
        ("~nobody-has-this-name/a", "which begins with the home of an unknown user"),
    ],
    ids=["long name", "long path", "zero byte", "home"],
)
def test_configuration_paths_that_no_file_system_takes_are_refused(
    field: str, path: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(["train", f"--{field}", path], capsys)
    assert f"{field} is " in err
    assert told in err


def test_command_line_paths_that_are_too_long_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in [
        ["train", "--config", "a" * 5000],
        ["checkpoint", "inspect", "a" * 5000],
        ["checkpoint", "convert", "a" * 5000, "b"],
        ["checkpoint", "export", "a" * 5000, "b", "--format", "dcp"],
        ["checkpoint", "import", "a" * 5000, "b", "--format", "dcp"],
        ["checkpoint", "import", "a" * 5000, "b", "--format", "huggingface"],
        ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--svg", "a" * 5000],
        ["schedule", "a" * 5000 + ".csv"],
    ]:
        assert "File name too long" in refused(arguments, capsys)


def test_configuration_files_with_invalid_values_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, told in [
        ("[train]\nlr = nan", "train.lr is NaN"),
        (
            f"[model]\nvocab = 0x{'f' * 6000}",
            "is not valid TOML, mend it there: model.vocab is a whole number that takes more than 64 bits",
        ),
        ("[train]\nsteps = 1979-05-27", 'train.steps is "1979-05-27"'),
        ("[train]\nsteps = 'none'", 'train.steps is "none"'),
        ("x = " + "[" * 100_000, "is not valid TOML"),
        ("[[train]]\nsteps = 1", "train"),
    ]:
        (tmp_path / "c.toml").write_text(line)
        assert told in refused(["train", "--config", str(tmp_path / "c.toml")], capsys)


@pytest.mark.parametrize(
    "name", ["run.save_every", "run.threads", "train.loss_scale", "train.master_precision"]
)
def test_the_text_none_sets_an_optional_field_to_none(name: str, tmp_path: Path) -> None:
    section, _, field = name.partition(".")
    (tmp_path / "c.toml").write_text(f'[{section}]\n{field} = "none"\n')
    for config in (
        config_from_arguments(["--config", str(tmp_path / "c.toml")]),
        config_from_arguments([f"--{name}", "none"]),
    ):
        assert getattr(getattr(config, section), field) is None


@pytest.mark.transformers
def test_an_invalid_size_in_a_models_config_json_is_refused_naming_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 1}
    usual |= {"bos_token_id": None, "eos_token_id": None}  # of which transformers would tell, too
    (tmp_path / "config.json").write_text(json.dumps(usual))
    err = refused(["train", "--model.name", str(tmp_path)], capsys)
    assert f"model.vocab is 1 (from the folder {tmp_path}): give a whole number of at least 2" in err


def test_a_rank_that_runs_out_of_memory_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes."

    def fail(arguments: list[str]) -> int:
        raise RankError("rank 3 failed", 3, f"Traceback\nRuntimeError: {words}\n")

    monkeypatch.setattr(module, "_dispatch", fail)
    assert "rank 3 is out of memory for 68719476736 bytes: make the model" in refused(["train"], capsys)


BAD_CONFIGS = {
    "a number is text": {"hidden_size": "x"},
    "a size is zero": {"num_attention_heads": 0},
    "a size is negative": {"num_hidden_layers": -1},
    "a size is huge": {"vocab_size": 2**62},
    "layers are many": {"num_hidden_layers": 10**9},
    "a size is null": {"vocab_size": None},
    "the type is a list": {"model_type": []},
    "rotary embedding is a list": {"rope_parameters": [1]},
    "rotary embedding is unheard of": {"rope_parameters": {"rope_type": "evil", "rope_theta": 1}},
    "the activation is unheard of": {"hidden_act": "evil"},
    "the dtype is unheard of": {"dtype": "evil"},
    "the dropout is unheard of": {"attention_dropout": 2},
}


@pytest.mark.transformers
@pytest.mark.parametrize("flaw", BAD_CONFIGS)
def test_a_model_configuration_that_transformers_refuses_is_refused_in_one_sentence(
    flaw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from plait.errors import PlaitError
    from plait.models.huggingface.pretrained import model_in, sizes_in

    usual = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    usual |= {"num_hidden_layers": 1, "vocab_size": 9, "max_position_embeddings": 4}
    (tmp_path / "config.json").write_text(json.dumps(usual | BAD_CONFIGS[flaw]))
    for read in (sizes_in, model_in) if "unheard" not in flaw else (model_in,):
        with pytest.raises(PlaitError) as refusal:
            read(tmp_path)
        assert "config.json" in str(refusal.value)
        assert "\n" not in str(refusal.value)
    if "unheard" not in flaw:  # sizes are looked at first
        refused(["train", "--model.name", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--microbatches", "1000000", "--ranks", "2"], "make 2,000,000 forwards, and plait schedule takes"),
        (["--microbatches", "1" + "0" * 400, "--ranks", "2"], "is not a whole number"),
        (["--microbatches", "2", "--ranks", "2", "--cost.F", "1" + "0" * 400], "is not a finite number"),
        (
            ["--microbatches", "2", "--ranks", str(2**63)],
            "forwards, and plait schedule takes 262,144 at most",
        ),
    ],
)
def test_plait_schedule_refuses_more_actions_than_it_can_simulate_quickly(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(["schedule", "1f1b", *arguments], capsys)


def test_a_schedule_csv_with_a_micro_batch_number_far_beyond_its_actions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.csv").write_text("0F0,0F999999999,0B0\n")
    assert "there is a micro-batch 999999999 among 3 actions" in refused(
        ["schedule", str(tmp_path / "s.csv")], capsys
    )


HEADERS = {
    "a length beyond 64 bits": "(99999999999999999999,)",
    "a length beyond memory": "(4611686018427387904,)",
    "an open bracket": "[[[",
    "a call": "__import__('os')",
}


@pytest.mark.parametrize("flaw", HEADERS)
def test_a_token_array_with_an_invalid_npy_header_is_refused(flaw: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {HEADERS[flaw]}, }}".ljust(117) + "\n"
    magic = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(magic + header.encode() + bytes(64))
    with pytest.raises(DataError, match=r"cannot be read as a \.npy array: [^\n]*$"):
        open_tokens(str(tmp_path / "a.npy"), "uint16")


def test_an_npz_archive_in_place_of_a_token_array_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npy", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(DataError, match="is an archive of arrays"):
        open_tokens(str(tmp_path / "a.npy"), "uint16")
