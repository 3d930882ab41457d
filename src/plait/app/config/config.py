"""`Config`: the configuration of a training run in five typed sections, validated on construction."""

from __future__ import annotations

from operator import attrgetter
from typing import Self

from pydantic import model_validator

from plait.app.config.config_sections import DataConfig, ParallelConfig, RunConfig, Section
from plait.app.config.model_section import ModelConfig, invalid_path
from plait.app.config.train_section import BALANCE_FIELDS, TrainConfig
from plait.app.data.tokenizer import open_tokenizer
from plait.errors import ConfigError, ModelError, listed
from plait.plan.axes import PLAN_AXES
from plait.plan.decoder_sizes import MOST_BLOCKS, MOST_SIZE, Decoder, divisors, multiples
from plait.plan.plan import Plan
from plait.schedules.search.schedule_by_policy import default_chunks

_COUNTS = (
    "heads",
    "kv_heads",
    "experts",
    "top_k",
    "microbatches",
    *PLAN_AXES,
    "replicate",
    "ep",
    "etp",
    "chunks",
)
LIMITS = {
    **dict.fromkeys(_COUNTS, 2**16),
    "layers": MOST_BLOCKS,
    "hidden": 2**24,
    "inner": 2**26,
    "shared": 2**26,
    "context": 2**24,
}
"""The largest values of fields whose value takes time or memory."""
LONGEST_TIMEOUT = 10**6
"""Seconds: timeouts are milliseconds in 32 bits."""
RANDOM = "random"
"""The source of random tokens, which have no end."""
PATHS = ("model.name", "model.lora.adapter", "data.source", "data.tokenizer", "run.dir", "run.resume")


class Config(Section):
    """The configuration of a run. Raises `ConfigError` where fields contradict each other."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_magnitudes(self)
        _check_paths(self)
        _check_adapter(self.model)
        if self.model.folder is None:
            _check_family(self.model)
            _check_balance(self.model, self.train)
            _check_tensor_parallel(self.model, self.parallel.tp)
            _check_context_parallel(self.model, self.parallel)
        _check_batch(self.train, self.parallel.dp)
        _check_parallel(self.parallel)
        check_steps(self)
        _check_epochs(self)
        _check_validation(self)
        _check_rates(self.train)
        _check_saves(self.run)
        _check_elastic(self.run)
        _check_rebalance(self.run)
        return self

    @property
    def tokenizer(self) -> str:
        """The tokenizer: "bytes" or a path, from `data.tokenizer`, the corpus, or the model's folder."""
        known, folder = self.data.known_tokenizer, self.model.folder
        if known is None and folder is not None and (folder / "tokenizer.json").is_file():
            return str(folder / "tokenizer.json")
        return known or "bytes"

    def plan(self) -> Plan:
        """Return the plan: the `parallel` section, and the micro-batches and precisions in `train`."""
        parallel = self.parallel.model_dump(exclude={"balance", "reorder"})
        formats = {"precision", "master_precision", "gradient_precision", "reduce_precision", "loss_scale"}
        return Plan(**parallel, **self.train.model_dump(include={"microbatches", *formats}))


def _check_magnitudes(config: Config) -> None:
    """Raise ConfigError for sizes and counts that no machine could hold or run, before they are used."""
    for section, fields in config:
        for name, value in fields:
            most = LIMITS.get(name, MOST_SIZE)
            if isinstance(value, int) and name != "seed" and value > most:
                shown = value if value < 10**24 else f"about 2^{value.bit_length() - 1}"
                raise ConfigError(
                    f"{section}.{name} = {shown} is more than {most}, the most that plait takes: give a "
                    "smaller one."
                )
    if config.run.timeout > LONGEST_TIMEOUT:
        raise ConfigError(
            f"run.timeout = {config.run.timeout:g} is more than {LONGEST_TIMEOUT} seconds: "
            "give a shorter time."
        )


def _check_paths(config: Config) -> None:
    """Raise ConfigError for paths that no file system accepts."""
    for field in PATHS:
        text = str(attrgetter(field)(config))
        reason = invalid_path(text)
        if reason is not None:
            raise ConfigError(
                f"{field} is {text[:60]!r}{'…' * (len(text) > 60)}, {reason}: give another path."
            )


def _check_adapter(model: ModelConfig) -> None:
    """Raise ConfigError for `model.lora` fields that contradict a given adapter, or need adapters."""
    adapter, given = model.lora.adapter, model.lora.model_dump(exclude_defaults=True)
    if adapter is not None and model.folder is None:
        raise ConfigError(
            f"model.lora.adapter = {adapter!r} is given with model.name = {model.name}: set model.name to "
            "the folder of the model for which the adapter was trained."
        )
    for name, value in given.items():
        if adapter is not None and name != "adapter":
            raise ConfigError(
                f"model.lora.{name} = {value} is given with model.lora.adapter, with a {name} of its own: "
                "leave one of them out."
            )
        if not model.lora.adapts:
            raise ConfigError(
                f"model.lora.{name} = {value} is given, and without model.lora.rank there are no adapters: "
                "set model.lora.rank, such as to 8."
            )


def check_steps(config: Config) -> None:
    """Raise ConfigError where a field names a step, or a number of steps, beyond the run's `train.steps`."""
    run, train, steps = config.run, config.train, config.train.steps
    if train.epochs is not None:
        return
    decay = train.schedule.decay
    if decay is not None and train.warmup + decay > steps:
        raise ConfigError(
            f"train.warmup = {train.warmup} and train.schedule.decay = {decay} are more than train.steps = "
            f"{steps} together: lower one of them."
        )
    fields = {"run.compare": run.compare, "run.trace": run.trace, "parallel.reorder": config.parallel.reorder}
    for name, value in fields.items():
        if value > steps:
            raise ConfigError(
                f"{name} = {value} is more than train.steps = {steps}: set {name} to at most {steps}."
            )


def _check_epochs(config: Config) -> None:
    """Raise ConfigError for epochs of data that have no end, or of several sources."""
    epochs, data = config.train.epochs, config.data
    if epochs is not None and RANDOM in data.sources:
        raise ConfigError(
            f"train.epochs = {epochs:g} is given, but data.source = {RANDOM} has no end: give train.steps."
        )
    if epochs is not None and len(data.sources) > 1:
        raise ConfigError(
            f"train.epochs = {epochs:g} is given, but each source of data.mixture has epochs of its own: "
            "give train.steps; the run prints how many epochs of each they are."
        )


def _check_rates(train: TrainConfig) -> None:
    """Raise ConfigError for parameters that have a rate, or are frozen, twice."""
    patterns = [one.pattern for one in train.rates]
    for field, given in (("train.rates", patterns), ("train.freeze", list(train.freeze))):
        twice = next((one for one in given if given.count(one) > 1), None)
        if twice is not None:
            raise ConfigError(f"{field} has the pattern {twice!r} twice: write it once.")
    both = next((one for one in patterns if one in train.freeze), None)
    if both is not None:
        raise ConfigError(f"{both!r} is in train.rates and in train.freeze: leave it out of one of them.")


def _check_saves(run: RunConfig) -> None:
    """Raise ConfigError if `run.save_minutes` is set, but `run.save_every` disables checkpoints."""
    if run.save_every is None and run.save_minutes:
        raise ConfigError(
            f"run.save_minutes = {run.save_minutes:g} is given, but run.save_every is none, so that "
            "nothing is saved: set run.save_every to 0 to save at the end and after so many minutes."
        )


def _check_rebalance(run: RunConfig) -> None:
    """Raise ConfigError for `run.rebalance` where `run.stragglers` is 0, so that no slow rank is found."""
    if run.rebalance and not run.stragglers:
        raise ConfigError(
            "run.rebalance is given, but run.stragglers is 0, and no slow rank is found: set it to the steps "
            "between comparisons, such as 4."
        )


def _check_elastic(run: RunConfig) -> None:
    """Raise ConfigError for elastic threads, and for options of elastic ranks without `run.elastic`."""
    given = {
        "spares": str(run.spares or ""),
        "replace": "" if run.replace is True else str(run.replace).lower(),
        "hosts": ", ".join(run.hosts),
    }
    for field, value in given.items():
        if value and not run.elastic:
            raise ConfigError(
                f"run.{field} = {value} is given, but run.elastic is false: set that to true, or leave "
                f"run.{field} out."
            )
    if run.elastic and run.ranks_as == "threads":
        raise ConfigError(
            "run.elastic restarts processes, but run.ranks_as is threads: leave one of them out."
        )
    if run.replace == "later" and not run.snapshot_steps:
        raise ConfigError(
            "run.replace is later, but run.snapshot_every is 0, and new ranks join right after a snapshot: "
            "set run.snapshot_every above 0, or run.replace to true."
        )


def _check_validation(config: Config) -> None:
    """Raise ConfigError if validation losses are to be compared, but there are none during the run."""
    settings, data, best = config.train, config.data, config.run.keep_best
    asked = f"run.keep_best = {str(best).lower()}"
    if settings.patience:
        asked = f"train.patience = {settings.patience}"
    named = list(data.validation_sources)
    if settings.watch is not None and settings.watch not in named:
        others = f"those of data.validation_source, {listed(named)}" if any(named) else "none with a name"
        raise ConfigError(
            f"train.watch = {settings.watch!r} names a validation, but there are {others}: name one of "
            "data.validation_source, or leave it out."
        )
    if not settings.patience and not best:
        if settings.watch is not None:
            raise ConfigError(
                f"train.watch = {settings.watch!r} is given without train.patience or run.keep_best, which "
                "compare its losses: set one of them, or leave it out."
            )
        return
    if not data.validation_source and not data.validation:
        raise ConfigError(
            f"{asked} needs a validation loss, but data.validation is 0: raise it, or set "
            "data.validation_source."
        )
    if not settings.validate_every:
        raise ConfigError(
            f"{asked} compares validations during the run, but train.validate_every is 0: set it to the "
            "steps between them."
        )


def _check_balance(model: ModelConfig, train: TrainConfig) -> None:
    """Raise ConfigError for settings that balance experts in a model without experts."""
    given = [name for name in BALANCE_FIELDS if getattr(train, name) not in (None, False)]
    if given and model.experts is None:
        raise ConfigError(
            f"train.{given[0]} = {getattr(train, given[0])} balances experts, and the model has none: set "
            "model.experts, or leave it out."
        )


def _check_family(model: ModelConfig) -> None:
    """Raise ConfigError if fields that only llama has are given for another model."""
    for name in ("kv_heads", "inner", "experts", "top_k", "shared"):
        value = getattr(model, name)
        if model.name != "llama" and value:
            raise ConfigError(
                f"model.{name} = {value} is a field of llama, but model.name is {model.name}: "
                "leave it out, or set model.name to llama."
            )
    if model.top_k is not None and model.experts is None:
        raise ConfigError(
            f"model.top_k = {model.top_k} is a field of models with experts: set model.experts to their "
            "number, or leave model.top_k out."
        )


def _check_tensor_parallel(model: ModelConfig, tp: int) -> None:
    """Raise ConfigError if sizes do not fit each other, or `tp` ranks cannot share heads and features."""
    try:
        sizes = model.decoder(1)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    undivided = sizes.undivided_by(tp)
    if undivided == "heads":
        raise ConfigError(
            f"model.heads = {sizes.heads} is not divisible by parallel.tp = {tp}: "
            f"set parallel.tp to {divisors(sizes.heads)}{_heads_for(model, tp)}."
        )
    if undivided == "kv_heads":
        raise ConfigError(
            f"model.kv_heads = {sizes.key_heads} is neither a multiple nor a divisor of parallel.tp = {tp}: "
            f"set model.kv_heads to {divisors(tp)}, or change parallel.tp."
        )
    if undivided == "shared":
        raise ConfigError(
            f"model.shared = {sizes.shared} is not divisible by parallel.tp = {tp}: set model.shared to "
            f"{multiples(sizes.shared, tp)}, or change parallel.tp."
        )
    if undivided == "inner":
        origin = "" if model.inner is not None else f", the default for model.hidden = {model.hidden},"
        raise ConfigError(
            f"model.inner = {sizes.inside}{origin} is not divisible by parallel.tp = {tp}: "
            f"set model.inner to {multiples(sizes.inside, tp)}, or change parallel.tp."
        )


def _check_context_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError if `cp` ranks cannot share the heads of a `tp` rank, though Ulysses is asked for."""
    heads = model.heads // parallel.tp
    if parallel.context_parallel == "ulysses" and heads % parallel.cp:
        raise ConfigError(
            f"parallel.context_parallel is ulysses, but model.heads = {model.heads} over parallel.tp = "
            f"{parallel.tp} is not divisible by parallel.cp = {parallel.cp}: set parallel.context_parallel "
            f"to ring, or parallel.cp to {divisors(heads)}."
        )


def _heads_for(model: ModelConfig, tp: int) -> str:
    """Return advice for an error: numbers of heads near `model.heads` that `tp` divides, or "" if none."""
    fitting = [heads for heads in range(tp, model.hidden + 1, tp) if model.hidden % heads == 0]
    nearest = sorted(sorted(fitting, key=lambda heads: abs(heads - model.heads))[:2])
    return f", or model.heads to {' or '.join(map(str, nearest))}" if nearest else ""


def _check_batch(train: TrainConfig, dp: int) -> None:
    parts = dp * train.microbatches
    if train.batch % parts:
        raise ConfigError(
            f"train.batch = {train.batch} does not divide into parallel.dp = {dp} times "
            f"train.microbatches = {train.microbatches} equal parts: "
            f"set train.batch to {multiples(train.batch, parts)}, or change train.microbatches."
        )


def _check_parallel(parallel: ParallelConfig) -> None:
    if parallel.dp % parallel.replicate:
        raise ConfigError(
            f"parallel.replicate = {parallel.replicate} does not divide parallel.dp = {parallel.dp}: "
            f"set parallel.replicate to {divisors(parallel.dp)}."
        )
    ranks = parallel.dp // parallel.replicate * parallel.cp * parallel.tp
    if ranks % (parallel.ep * parallel.etp):
        raise ConfigError(
            f"parallel.ep = {parallel.ep} times parallel.etp = {parallel.etp} does not divide the {ranks} "
            "ranks of shard × cp × tp between which experts can be divided: "
            f"set parallel.ep to {divisors(ranks)}."
        )
    counts = parallel.layers_per_stage
    if counts is None:
        return
    chunks = parallel.chunks or default_chunks(parallel.schedule, ranks=parallel.pp, stages=len(counts))
    if len(counts) != parallel.pp * chunks:
        raise ConfigError(
            f"parallel.layers_per_stage = [{listed([*map(str, counts)])}] cuts another number of stages than "
            f"parallel.pp = {parallel.pp} times parallel.chunks = {chunks}: "
            "give one count for each stage, or leave it out."
        )


def configured_decoder(config: Config) -> Decoder | None:
    """Return the sizes of the configured model; None where they do not suffice for a prediction.

    That is for a model in a folder, experts, adapters or other frozen parameters, an optimizer without two
    moments a parameter, offloading, and linears in float8. No module is made.
    """
    model, train = config.model, config.train
    adapts, freezes, sparse = model.lora.adapts, bool(train.freeze), model.experts is not None
    others = model.folder is not None or adapts or freezes or sparse or train.optimizer.moments != 2
    if others or config.parallel.offload != "none" or config.parallel.linears is not None:
        return None
    return model.decoder(vocabulary(config))


def vocabulary(config: Config) -> int:
    """Return the vocabulary size of plait's own model: `model.vocab`, else that of the tokenizer."""
    return config.model.vocab or open_tokenizer(config.tokenizer).vocab
