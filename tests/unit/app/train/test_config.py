"""The configuration tree: its defaults, its checks, and how a file and options become one."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.app.config.config import Config
from plait.app.config.config_parser import allowed_values_text, config_from_arguments, fields
from plait.app.config.config_sections import ParallelConfig
from plait.app.config.model_section import ModelConfig
from plait.app.config.train_section import TrainConfig
from plait.errors import ConfigError
from plait.plan.plan import Plan


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text('[model]\nlayers = 2\ntied = false\n[train]\nlr = 1\n[run]\ndir = "a folder"\n')
    return path


def test_defaults_make_a_single_rank_plan() -> None:
    assert Config().plan() == Plan(schedule="1f1b", microbatches=4, precision="fp32")
    assert config_from_arguments([]) == Config()


def test_the_plan_takes_every_parallel_field() -> None:
    parallel = ParallelConfig(
        pp=2, tp=2, dp=2, replicate=2, schedule="gpipe", overlap=True, layers_per_stage=(4, 6)
    )
    plan = Config(parallel=parallel, train=TrainConfig(microbatches=2, precision="fp64")).plan()
    expected = Plan(
        pp=2,
        tp=2,
        dp=2,
        replicate=2,
        schedule="gpipe",
        overlap=True,
        layers_per_stage=(4, 6),
        microbatches=2,
        precision="fp64",
    )
    assert plan == expected


def test_the_plan_takes_the_fields_of_context_parallelism() -> None:
    plan = config_from_arguments(
        ["--parallel.cp", "3", "--parallel.context_parallel", "ring", "--parallel.context_layout", "striped"]
    ).plan()
    assert (plan.cp, plan.context_parallel, plan.context_layout) == (3, "ring", "striped")
    assert plan.world == 3


def test_options_override_the_file(demo: Path) -> None:
    config = config_from_arguments(
        ["--config", str(demo), "--model.layers", "3", "--train.lr=.5", "--train.sample", "5"]
    )
    assert config.model == ModelConfig(layers=3, tied=False)
    assert (config.train.lr, config.train.sample) == (0.5, "5")
    assert config.run.dir == Path("a folder")
    assert config_from_arguments(["--config", str(demo)]).train.lr == 1.0
    usual = {"train": {"lr": 2.0, "clip": 3.0}}
    trained = config_from_arguments(["--config", str(demo)], usual, "elsewhere").train
    assert (trained.lr, trained.clip) == (1.0, 3.0), "the file comes before what is usual"


def test_values_are_read_as_the_field_wants_them() -> None:
    for option, field, value in [
        (["--run.progress", "false"], "run.progress", False),
        (["--run.progress=True"], "run.progress", True),
        (["--train.betas", "[0.8, 0.9]"], "train.betas", (0.8, 0.9)),
        (["--parallel.layers_per_stage", "[10]"], "parallel.layers_per_stage", (10,)),
        (["--parallel.layers-per-stage=[10]"], "parallel.layers_per_stage", (10,)),
        (["--train.betas", "0.8,0.9"], "train.betas", (0.8, 0.9)),
        (["--data.mixture", "a=3, b=1"], "data.mixture", ("a=3", "b=1")),
        (["--model.vocab", "none"], "model.vocab", None),
        (["--train.sample=--x"], "train.sample", "--x"),
        (["--data.source", "none"], "data.source", "none"),
        (["--train.lr", "2"], "train.lr", 2.0),
        (["--train.seed", "1", "--train.seed", "2"], "train.seed", 2),
        (["--run.threads", "2"], "run.threads", 2),
        (["--parallel.overlap", "false"], "parallel.overlap", False),
        (["--parallel.overlap", "none"], "parallel.overlap", None),
    ]:
        section, name = field.split(".")
        read = getattr(getattr(config_from_arguments(option), section), name)
        assert read == value
        assert type(read) is type(value)


def test_a_configuration_survives_json() -> None:
    config = config_from_arguments(["--parallel.pp", "2", "--parallel.layers_per_stage", "[5, 5]"])
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_the_example_configurations_are_valid() -> None:
    examples = Path(__file__).parents[4] / "examples"
    configs = {path.name: config_from_arguments(["--config", str(path)]) for path in examples.glob("*.toml")}
    assert configs["demo.toml"].plan().world == 4


MOST = {
    "model": {
        "layers": 10_000,
        "hidden": 2**24,
        "heads": 2**16,
        "kv_heads": 2**16,
        "inner": 2**26,
        "experts": 2**16,
        "top_k": 2**16,
        "shared": 2**26,
        "vocab": 0,
    }
    | {"context": 2**24},
    "train": {"microbatches": 2**16, "steps": 0, "batch": 0, "warmup": 0, "sample_tokens": 0},
    "parallel": dict.fromkeys(("pp", "cp", "tp", "dp", "replicate", "chunks"), 2**16),
    "run": {"save_every": 0, "keep_last": 0, "compare": 0},
}
"""The largest values; 0: that of a C int."""


def test_configuration_values_beyond_every_limit_are_refused() -> None:
    for section, fields_of in MOST.items():
        for name, most in fields_of.items():
            for more in (0, 1):
                value = (most or 2**31 - 1) + more
                text = ""
                try:
                    Config.model_validate({section: {name: value}})
                except ConfigError as error:  # other fields may contradict the largest value
                    text = str(error)
                told = f"{section}.{name} = {value} is more than {value - more}, the most that plait takes"
                assert (told in text) == bool(more), (section, name)
    assert Config.model_validate({"train": {"seed": 2**63 - 1}}).train.seed == 2**63 - 1
    assert Config.model_validate({"run": {"timeout": 1e6}}).run.timeout == 1e6
    with pytest.raises(ConfigError, match=r"run\.timeout = 1e\+06 is more than 1000000 seconds"):
        Config.model_validate({"run": {"timeout": 1e6 + 1}})


def test_every_field_is_described() -> None:
    assert all(field["description"] and allowed_values_text(field) for field in fields().values())
    assert allowed_values_text(fields()["model.vocab"]) == "a whole number of at least 2 or none"
    assert (
        allowed_values_text(fields()["train.betas"])
        == "a list [...] of 2 numbers of at least 0 and below 1 or none"
    )
    assert allowed_values_text(fields()["train.precision"]) == "one of fp64, fp32, bf16, fp16"


WRONG_OPTIONS = [
    ("--train.steps abc", 'train.steps is "abc" (from the command line): give a whole number of at least 1.'),
    ("--train.steps 1.5", 'train.steps is "1.5" (from the command line): give a whole number of at least 1.'),
    (
        "--train.steps true",
        'train.steps is "true" (from the command line): give a whole number of at least 1.',
    ),
    ("--train.microbatches 0", "train.microbatches is 0 (from the command line): give a whole number of at"),
    ("--train.lr nan", "train.lr is NaN (from the command line): give a number above 0."),
    ("--train.lr 1e999", "train.lr is Infinity (from the command line): give a number above 0."),
    (
        "--train.min_lr 2",
        "train.min_lr is 2.0 (from the command line): give a number of at least 0 and at most 1 or none.",
    ),
    ("--train.betas [0.9]", "train.betas is [0.9] (from the command line): give a list [...] of 2 numbers"),
    ("--train.betas [0.9,1]", "train.betas is [0.9, 1] (from the command line): give a list"),
    ("--train.lr {(1,2):3}", 'train.lr is "{(1,2):3}" (from the command line): give a number above 0.'),
    (f"--train.lr x{'9' * 5000}", "9999… (from the command line): give a number"),
    (f"--train.steps {'9' * 5000}", "9999… (from the command line): give a whole"),
    (f"--train.betas {'[' * 9999}", "[[[[… (from the command line): give a list"),
    ("--data.source a\udcff", "(from the command line) is no UTF-8 text, or a number that is too long"),
    ("--=3", '"--=3" is not an option'),
    ("--run.progress 1", 'run.progress is "1" (from the command line): give true or false.'),
    (
        "--train.precision fp8",
        'train.precision is "fp8" (from the command line): give one of fp64, fp32, bf16, fp16.',
    ),
    (
        "--model.name bert",
        "model.name = 'bert' is neither gpt2 nor llama nor a folder with a config.json: give one of these; "
        "plait "
        "downloads nothing: if bert is a name on Hugging Face's hub, download it once by `hf download bert "
        "--local-dir "
        "FOLDER`, and give FOLDER.",
    ),
    ("--model.name 3.5", "model.name = '3.5' is neither gpt2 nor llama nor a folder"),
    ("--data.source=", 'data.source is "" (from the command line): give text, not empty.'),
    ("--model.vocab 1", "give a whole number of at least 2 or none."),
    (
        "--train.stepz 3",
        "train.stepz (from the command line) is not a known field: did you mean train.steps?",
    ),
    ("--steps 3", "steps (from the command line) is not a known field: did you mean train.steps?"),
    (
        "--trian.steps 3",
        "trian.steps (from the command line) is not a known field: did you mean train.steps?",
    ),
    ("--model.hiden 3", "did you mean model.hidden?"),
    ("--zzz 3", "zzz (from the command line) is not a known field: see `plait train --help`"),
    (
        "--model gpt2",
        "model (from the command line) is a section: set one of its fields, such as model.name.",
    ),
    ("--train.steps", "--train.steps has no value: give a whole number of at least 1 after it."),
    ("--train.steps --train.lr 1", "--train.steps has no value"),
    ("demo.toml", '"demo.toml" is not an option: write --section.field value, or --config FILE for a file.'),
    ("--config a --config b", "--config is given 2 times: give one configuration file."),
    ("--config nowhere.toml", "There is no configuration file nowhere.toml: check --config."),
]

CONTRADICTIONS = [
    (
        "--data.mixture a=2,b=0",
        "data.mixture holds 'b=0': write a source and a weight above 0, as SOURCE=3.",
    ),
    ("--data.mixture =2", "data.mixture holds '=2': write a source"),
    ("--data.mixture a=2,a=3", "data.mixture names a source twice: write its weight once."),
    (
        "--model.hidden 100 --model.heads 3",
        "model.hidden = 100 is not divisible by model.heads = 3: "
        "set model.hidden to 99 or 102, or change model.heads.",
    ),
    (
        "--train.batch 10 --parallel.dp 2",
        "train.batch = 10 does not divide into parallel.dp = 2 times train.microbatches = 4 equal parts: "
        "set train.batch to 8 or 16, or change train.microbatches.",
    ),
    (
        "--model.kv_heads 2",
        "model.kv_heads = 2 is a field of llama, but model.name is gpt2: "
        "leave it out, or set model.name to llama.",
    ),
    ("--model.inner 64", "model.inner = 64 is a field of llama, but model.name is gpt2: leave it out, or"),
    ("--model.experts 4", "model.experts = 4 is a field of llama, but model.name is gpt2: leave it out, or"),
    ("--model.name llama --model.top_k 2", "model.top_k = 2 is a field of models with experts: set model."),
    ("--model.name llama --model.shared 8", "model.shared = 8 is the width of shared experts, but model."),
    (
        "--model.name llama --model.experts 3 --model.top_k 4",
        "model.top_k = 4 is more than model.experts = 3: set model.top_k to at most 3",
    ),
    (
        "--model.name llama --model.experts 3 --model.inner 7 --model.shared 7 --parallel.tp 2",
        "model.shared = 7 is not divisible by parallel.tp = 2: set model.shared to 6 or 8, or",
    ),
    (
        "--model.name llama --model.heads 8 --model.kv_heads 3",
        "model.kv_heads = 3 does not divide model.heads = 8: set model.kv_heads to 1 or 2 or 4 or 8.",
    ),
    (
        "--model.name llama --model.hidden 20",
        "model.hidden = 20 over model.heads = 4 makes heads of 5 features, and llama turns pairs of them: "
        "set model.hidden to 16 or 24, or change model.heads.",
    ),
    (
        "--parallel.tp 3",
        "model.heads = 4 is not divisible by parallel.tp = 3: set parallel.tp to 1 or 2 or 4.",
    ),
    (
        "--model.hidden 96 --parallel.tp 3",
        "model.heads = 4 is not divisible by parallel.tp = 3: "
        "set parallel.tp to 1 or 2 or 4, or model.heads to 3 or 6.",
    ),
    (
        "--model.name llama --model.hidden 72 --model.heads 12 --model.kv_heads 6 --parallel.tp 4",
        "model.kv_heads = 6 is neither a multiple nor a divisor of parallel.tp = 4: "
        "set model.kv_heads to 1 or 2 or 4, or change parallel.tp.",
    ),
    (
        "--model.name llama --model.inner 10 --parallel.tp 4",
        "model.inner = 10 is not divisible by parallel.tp = 4: "
        "set model.inner to 8 or 12, or change parallel.tp.",
    ),
    (
        "--model.name llama --model.hidden 96 --model.heads 3 --parallel.tp 3",
        "model.inner = 256, the default for model.hidden = 96, is not divisible by parallel.tp = 3: "
        "set model.inner to 255 or 258, or change parallel.tp.",
    ),
    (
        "--parallel.tp 2 --parallel.cp 4 --parallel.context_parallel ulysses",
        "parallel.context_parallel is ulysses, but model.heads = 4 over parallel.tp = 2 is not divisible by "
        "parallel.cp = 4: set parallel.context_parallel to ring, or parallel.cp to 1 or 2.",
    ),
    ("--train.batch 2", "set train.batch to 4, or change train.microbatches."),
    (
        "--parallel.dp 4 --parallel.replicate 3",
        "parallel.replicate = 3 does not divide parallel.dp = 4: set parallel.replicate to 1 or 2 or 4.",
    ),
    (
        "--parallel.pp 2 --parallel.layers_per_stage [10]",
        "parallel.layers_per_stage = [10] cuts another number of stages than parallel.pp = 2 times",
    ),
    (
        "--train.patience 3 --train.validate_every 5 --data.validation 0",
        "train.patience = 3 needs a validation loss, but data.validation is 0: raise it, or set "
        "data.validation_source.",
    ),
    (
        "--run.keep_best true",
        "run.keep_best = true compares validations during the run, but train.validate_every is 0: set it",
    ),
    (
        "--run.compare 5 --train.steps 3",
        "run.compare = 5 is more than train.steps = 3: set run.compare to at most 3.",
    ),
]


def test_wrong_options_are_refused_in_one_sentence() -> None:
    for options, message in [*WRONG_OPTIONS, *CONTRADICTIONS]:
        with pytest.raises(ConfigError) as caught:
            config_from_arguments(options.split())
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_sizes_that_divide_over_the_ranks_are_accepted() -> None:
    for options in [
        "--parallel.tp 4",
        "--model.name llama --model.heads 8 --model.kv_heads 2 --parallel.tp 4",
        "--model.name llama --model.heads 8 --model.kv_heads 8 --model.inner 12 --parallel.tp 4",
        "--model.name llama --model.experts 3 --model.inner 7 --model.shared 8 --parallel.tp 2",
        "--model.vocab 257 --parallel.tp 2",
        "--parallel.tp 2 --parallel.cp 2 --parallel.context_parallel ulysses",
        "--parallel.cp 4 --model.heads 2 --model.context 7",
        "--model.hidden 12 --model.heads 4",  # GPT-2 may have heads of odd size
    ]:
        assert config_from_arguments(options.split()).plan().world in (1, 2, 4)


def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for text, message in [
        (b'[train]\nsteps = "abc"', 'train.steps is "abc" (from {path}): give a whole number of at least 1.'),
        (b'[model]\nlayers = "4"', 'model.layers is "4" (from {path}): give a whole number'),
        (b"[train]\nsteps = 2020-01-01", 'train.steps is "2020-01-01" (from {path}): give a whole number'),
        (b"[train]\nstep = 1", "train.step (from {path}) is not a known field: did you mean train.steps?"),
        (b"[train.steps]\na = 1", 'train.steps is {{"a": 1}} (from {path}): give a whole number'),
        (
            b"[modle]\nlayers = 1",
            "modle.layers (from {path}) is not a known field: did you mean model.layers?",
        ),
        (b"[zzz]", "zzz (from {path}) is not a known field"),
        (b"steps = 1", "steps (from {path}) is not a known field: did you mean train.steps?"),
        (b"model = 1", "model (from {path}) is a section: set one of its fields, such as model.name."),
        (b"[train]\nsteps 3", "{path} is not valid TOML, mend it there: "),
        (b"[train]\nsteps 3", "(at line 2, column 7)."),
        (b"[train]\nsteps = " + b"9" * 5000, "{path} is not valid TOML"),
        (b"\xff\xfe", "{path} is not valid TOML, mend it there: it is no UTF-8 text at byte 0."),
    ]:
        path = tmp_path / "wrong.toml"
        path.write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            config_from_arguments(["--config", str(path)])
        assert message.format(path=path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config_from_arguments(["--config", str(tmp_path)])


def test_errors_of_overridden_fields_name_the_command_line_and_not_the_file(demo: Path) -> None:
    with pytest.raises(ConfigError, match="from the command line"):
        config_from_arguments(["--config", str(demo), "--model.layers", "0"])
    demo.write_text("[model]\nlayers = 0")
    assert config_from_arguments(["--config", str(demo), "--model.layers", "1"]).model.layers == 1


@pytest.mark.parametrize("policy", ["zb-v", "auto"])
def test_a_cut_by_hand_has_a_count_for_each_chunk(policy: str) -> None:
    parallel = ParallelConfig(pp=2, schedule=policy, layers_per_stage=(3, 2, 2, 3))
    assert Config(parallel=parallel).plan().layers_per_stage == (3, 2, 2, 3)
