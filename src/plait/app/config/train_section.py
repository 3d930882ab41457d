"""The section `train` of the configuration: steps, optimizer, learning rates, validation, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from plait.app.config.config_sections import Count, Decay, Section
from plait.errors import ConfigError, listed
from plait.plan.plan import Precision

OptimizerName = Literal["AdamW", "Adam", "NAdam", "RAdam", "SGD", "RMSprop", "Adagrad", "Adafactor", "Muon"]
ScheduleName = Literal["cosine", "linear", "constant", "wsd"]
BalanceName = Literal["document", "step", "previous", "coupled document", "coupled step", "coupled previous"]
BALANCE_FIELDS = ("balance", "balance_weight", "z_weight", "bias_rate", "forced_routing")
"""Fields of `train` for models with experts."""
OPTIONS: Mapping[OptimizerName, tuple[str, ...]] = {
    "AdamW": ("betas", "eps", "amsgrad"),
    "Adam": ("betas", "eps", "amsgrad", "decoupled_weight_decay"),
    "NAdam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay"),
    "RAdam": ("betas", "eps", "decoupled_weight_decay"),
    "SGD": ("momentum", "dampening", "nesterov"),
    "RMSprop": ("eps", "alpha", "momentum", "centered"),
    "Adagrad": ("eps", "lr_decay"),
    "Adafactor": ("beta2_decay", "d", "owned"),
    "Muon": (
        *("betas", "eps", "momentum", "nesterov", "others_lr", "ns_steps", "adjust_lr_fn"),
        *("iterations", "per_head", "routers"),
    ),
}
"""The options of each class of `torch.optim`, and of `plait.Muon`, besides `lr` and `weight_decay`, which all
have."""
_OF_TRAIN = ("betas", "eps")
"""Options that are fields of `train`."""


def _spelled(names: Sequence[str]) -> BeforeValidator:
    """Return a validator that corrects the case of a text to that of the equal one among `names`."""
    spelling = {name.casefold(): name for name in names}
    return BeforeValidator(
        lambda text: spelling.get(text.casefold(), text) if isinstance(text, str) else text
    )


class OptimizerConfig(Section):
    """The optimizer (of torch.optim, or `plait.Muon`), and its options; unset ones keep its defaults."""

    name: Annotated[OptimizerName, _spelled(get_args(OptimizerName))] = "AdamW"
    """class of torch.optim that updates parameters; or Muon, which updates hidden matrices, beside AdamW"""
    momentum: Decay | None = None
    """share of the last update that is kept (SGD, RMSprop, Muon); none: 0, for Muon 0.95"""
    dampening: Annotated[float, Field(ge=0, le=1)] | None = None
    """share by which momentum takes less of a gradient (SGD); none: 0"""
    nesterov: bool | None = None
    """whether momentum looks ahead, as Nesterov's does (SGD, Muon); none: false, for Muon true"""
    amsgrad: bool | None = None
    """whether the largest second moment so far counts (Adam, AdamW); none: false"""
    momentum_decay: Annotated[float, Field(ge=0)] | None = None
    """decay of the momentum (NAdam); none: 0.004"""
    decoupled_weight_decay: bool | None = None
    """whether weights decay as with AdamW (Adam, NAdam, RAdam); none: false"""
    alpha: Decay | None = None
    """decay of the mean square of gradients (RMSprop); none: 0.99"""
    centered: bool | None = None
    """whether the variance of gradients is the divisor (RMSprop); none: false"""
    lr_decay: Annotated[float, Field(ge=0)] | None = None
    """decay of the learning rate with the steps (Adagrad); none: 0"""
    beta2_decay: Annotated[float, Field(le=0)] | None = None
    """exponent of the decay of the second moment (Adafactor); none: -0.8"""
    d: Annotated[float, Field(gt=0)] | None = None
    """root mean square above which an update is clipped (Adafactor); none: 1"""
    owned: bool | None = None
    """whether each parameter is updated whole by the rank that owns it, as by plait.Owned, so that every plan
    is allowed (Adafactor); none: false"""
    others_lr: Annotated[float, Field(gt=0)] | None = None
    """highest learning rate of what AdamW updates beside Muon; none: train.lr"""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] | None = None
    """iterations of Newton–Schulz (Muon); none: 5"""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    """factor of the learning rate by a matrix's sizes, as in torch.optim.Muon (Muon); none: match_rms_adamw,
    for which train.lr is as large as for AdamW"""
    iterations: Literal["bf16", "fp32", "fp64"] | None = None
    """number format of the iterations (Muon); none: bf16"""
    per_head: bool | None = None
    """whether each head of query, key and value is a matrix of its own (Muon); none: false"""
    routers: bool | None = None
    """whether weights of routers are hidden matrices (Muon); none: false"""

    @model_validator(mode="after")
    def _taken(self) -> OptimizerConfig:
        self.require_taken("train.optimizer", dict(self.given()))
        if self.name == "SGD" and self.nesterov and (not self.momentum or self.dampening):
            raise ConfigError(
                "train.optimizer.nesterov is true, which needs a momentum and no dampening: set "
                "train.optimizer.momentum, such as to 0.9, and leave train.optimizer.dampening out."
            )
        return self

    def given(self) -> Iterator[tuple[str, Any]]:
        """Yield the options that are set, with their values."""
        return ((name, value) for name, value in self if name != "name" and value is not None)

    def require_taken(self, section: str, given: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where `given` sets an option that this optimizer does not take."""
        taken = OPTIONS[self.name]
        for name, value in given.items():
            if name not in taken:
                places = [f"train.{one}" if one in _OF_TRAIN else f"train.optimizer.{one}" for one in taken]
                others = [one for one, options in OPTIONS.items() if name in options]
                raise ConfigError(
                    f"{section}.{name} = {value} is an option of {listed(others)}, and train.optimizer.name "
                    f"is {self.name}, which takes {listed(places)}: leave it out."
                )

    @property
    def moments(self) -> int | Literal["muon"]:
        """The number of state tensors that the optimizer keeps per parameter: 2 for AdamW; or "muon"."""
        if self.name == "Muon":
            return "muon"
        if self.name == "SGD":
            return int(bool(self.momentum))
        if self.name == "RMSprop":
            return 1 + bool(self.momentum) + bool(self.centered)
        return {"Adagrad": 1, "Adafactor": 0}.get(self.name, 2 + bool(self.amsgrad))


class ScheduleConfig(Section):
    """The learning rate over the steps, after the warm-up."""

    name: Annotated[ScheduleName, _spelled(get_args(ScheduleName))] = "cosine"
    """half a cosine, a line or nothing (constant) down to min_lr · lr; or wsd, warm-up–stable–decay: lr until
    a line at the end"""
    decay: Count | None = None
    """steps in which wsd falls, at the end; none: a tenth of all steps"""

    @model_validator(mode="after")
    def _taken(self) -> ScheduleConfig:
        if self.decay is not None and self.name != "wsd":
            raise ConfigError(
                f"train.schedule.decay = {self.decay} is an option of wsd, and train.schedule.name is "
                f"{self.name}: leave it out, or set the name to wsd."
            )
        return self


class RateConfig(Section):
    """A table of `train.rates`: parameters by name, and their learning rate and weight decay."""

    pattern: str = Field(min_length=1)
    scale: Annotated[float, Field(ge=0)] | None = None
    lr: Annotated[float, Field(ge=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: object) -> object:
        names = list(cls.model_fields)
        for name in given if isinstance(given, dict) else ():
            if name not in names:
                near = get_close_matches(str(name), names, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"give {listed(names)}."
                raise ConfigError(f"a table of train.rates has {str(name)!r}: {remedy}")
        return given

    @model_validator(mode="after")
    def _of_one_rate(self) -> RateConfig:
        if self.scale is None and self.lr is None and self.weight_decay is None:
            raise ConfigError(
                f"train.rates has pattern = {self.pattern!r} and nothing for it: add scale (a factor of "
                "train.lr), lr or weight_decay."
            )
        if self.scale is not None and self.lr is not None:
            raise ConfigError(
                f"train.rates gives {self.pattern!r} scale = {self.scale:g} and lr = {self.lr:g}: "
                "leave one of them out."
            )
        return self

    def scale_of(self, lr: float) -> float:
        """Return the factor that turns the run's learning rate `lr` into that of these parameters."""
        return self.lr / lr if self.lr is not None else 1.0 if self.scale is None else self.scale


class TrainConfig(Section):
    """The optimisation: by default AdamW, linear warm-up, then a cosine to the lowest learning rate."""

    steps: Count = 300
    """optimizer steps"""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """in place of steps: how often each sequence of the data is taken; none: steps count"""
    batch: Count = 16
    """sequences a step, over all ranks together"""
    microbatches: Count = 4
    """micro-batches a step, on each data-parallel rank"""
    lr: float = Field(default=1e-3, gt=0)
    """highest learning rate, reached after the warm-up"""
    min_lr: Annotated[float, Field(ge=0, le=1)] | None = None
    """learning rate of the last step, as a fraction of lr, where it falls; none: 0.1"""
    warmup: int = Field(default=20, ge=0)
    """steps of linear warm-up"""
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """decay of matrices; vectors do not decay; none: 0.1 for AdamW and Muon, else 0"""
    betas: tuple[Decay, Decay] | None = None
    """decay of both moments of Adam and similar optimizers, beside Muon too; none: 0.9 and 0.95"""
    eps: Annotated[float, Field(gt=0)] | None = None
    """epsilon in the optimizer's divisor; none: its own, of AdamW 1e-8"""
    rates: tuple[RateConfig, ...] = ()
    """learning rate (lr, or scale, a factor of train.lr) and weight_decay of parameters whose name has the
    pattern; the first that fits counts"""
    freeze: tuple[str, ...] = ()
    """patterns of the names of parameters that do not train: whole parts of a name, with *"""
    clip: float = Field(default=1.0, ge=0)
    """largest gradient norm over the whole mesh; 0: no clipping"""
    balance: BalanceName | None = None
    """tokens whose choices of experts are balanced: those of each document; of the whole step, which the
    schedule gpipe or one micro-batch allows; or of the previous step; coupled: of all layers together; none:
    as the model in a folder says, else document"""
    balance_weight: Annotated[float, Field(ge=0)] | None = None
    """factor of the balance loss of each layer, which is model.top_k where all experts have the same load;
    none: that of the model in a folder, else 0"""
    z_weight: Annotated[float, Field(ge=0)] | None = None
    """factor of the z-loss of each router, the mean square of log Σ exp(logits); none: 0"""
    bias_rate: Annotated[float, Field(ge=0)] | None = None
    """by how much a step corrects the bias of routers that have one, as in DeepSeek-V3; none: 0"""
    forced_routing: bool = False
    """whether training sends tokens to experts in turn, which loads all alike, for timings: the model learns
    with other experts than its routers choose"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """seed of initial values, data order and samples"""
    precision: Precision = "fp32"
    """number format of the computation"""
    master_precision: Precision | None = None
    """number format of the parameters that the optimizer updates; none: fp32 for bf16 and fp16, else like
    precision"""
    gradient_precision: Precision | None = None
    """number format in which gradients are accumulated; none: like master_precision"""
    reduce_precision: Precision | None = None
    """number format in which gradients are reduced; none: like gradient_precision"""
    loss_scale: float | None = Field(default=None, gt=0)
    """factor of the loss; none: dynamic for fp16, else 1"""
    validate_every: int = Field(default=0, ge=0)
    """steps between validations; 0: only at the end"""
    validate_batches: Count | None = None
    """the most batches in a validation, of evenly spaced sequences; none: each held-out sequence once (of
    random tokens 8 batches)"""
    patience: int = Field(default=0, ge=0)
    """validations in a row without a lower loss after which the run ends; 0: never"""
    watch: str | None = Field(default=None, min_length=1)
    """name of the validation that patience and run.keep_best compare; none: the first"""
    sample: str = ""
    """prompt that is continued after training, a question where the data are conversations; empty: no
    sample"""
    sample_tokens: Count = 200
    """tokens the sample continues for"""
    sample_every: int = Field(default=0, ge=0)
    """steps between samples, which the report shows; 0: only after training"""

    @field_validator("optimizer", "schedule", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        """Return a name, given in place of a section, as a section with that name."""
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        options = {"betas": self.betas, "eps": self.eps}
        given = {name: value for name, value in options.items() if value is not None}
        self.optimizer.require_taken("train", given)
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ConfigError(
                f"train.epochs = {self.epochs:g} and train.steps = {self.steps} are both given: leave one of "
                "them out."
            )
        if self.min_lr is not None and self.schedule.name == "constant":
            raise ConfigError(
                f"train.min_lr = {self.min_lr:g} is given, but train.schedule.name is constant, which does "
                "not fall: leave it out, or choose another schedule."
            )
        if self.sample_every and not self.sample:
            raise ConfigError(
                f"train.sample_every = {self.sample_every} is given without a prompt: set train.sample."
            )
        return self

    @property
    def matrix_decay(self) -> float:
        """The weight decay of matrices."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.1 if self.optimizer.name in ("AdamW", "Muon") else 0.0

    @property
    def lowest_lr(self) -> float:
        """The learning rate of the last step, where the schedule falls."""
        return self.lr * (0.1 if self.min_lr is None else self.min_lr)

    def balance_options(self) -> dict[str, Any]:
        """Return the set arguments of `balance_experts`, which balances experts' loads; empty for none."""
        given = {"weight": self.balance_weight, "z_weight": self.z_weight, "bias_rate": self.bias_rate}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.balance is not None:
            words = self.balance.split()
            options |= {"counts": words[-1], "coupled": len(words) > 1}
        if self.forced_routing:
            options["forced_routing"] = True
        return options

    def optimizer_options(self) -> dict[str, Any]:
        """Return the options of the optimizer, besides its learning rate and weight decay."""
        options = dict(self.optimizer.given())
        if self.optimizer.name in ("AdamW", "Adam", "NAdam", "RAdam", "Muon"):
            options["betas"] = (0.9, 0.95) if self.betas is None else self.betas
        return options if self.eps is None else options | {"eps": self.eps}
