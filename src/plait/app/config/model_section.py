"""The section `model` of the configuration: sizes that are given, or read from a model's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, field_validator, model_validator

from plait.app.config.config_sections import Count, Decay, Section
from plait.errors import ConfigError, ModelError, hub_remedy
from plait.plan.decoder_sizes import Decoder, Family

OWN_MODELS = ("gpt2", "llama")
"""Names of plait's own models; any other `model.name` is a folder."""
USUAL_CONTEXT = 1024
"""The context of a folder's model where neither the configuration nor the data give one, at most its own."""
_MOST_BYTES, _MOST_BYTES_A_NAME = 4095, 255


class LoraConfig(Section):
    """Low-rank adapters of frozen linears (Hu et al. 2021)."""

    rank: int = Field(default=0, ge=0, le=2**16)
    """rank of LoRA's adapters; 0: none, and all parameters train"""
    alpha: float = Field(default=16.0, gt=0)
    """adapters are scaled by alpha / rank"""
    dropout: Decay = 0.0
    """dropout before the adapters"""
    targets: tuple[str, ...] | None = None
    """patterns of the paths, or their ends, of linears and experts' matrices to adapt; none: all linears but
    the head"""
    adapter: str | None = Field(default=None, min_length=1)
    """a folder of peft whose adapter is trained on, with its own rank, alpha, dropout and targets"""

    @field_validator("targets", mode="before")
    @classmethod
    def _tuple(cls, given: object) -> object:
        """Return a list, which JSON has in place of a tuple, as a tuple."""
        return tuple(given) if isinstance(given, list) else given

    @property
    def adapts(self) -> bool:
        """Whether the linears of the model get LoRA adapters."""
        return self.rank > 0 or self.adapter is not None


class ModelConfig(Section):
    """The model, built as a sequence of layers."""

    name: str = Field(default="gpt2", min_length=1)
    """gpt2, llama, or a folder with the config.json of a Hugging Face model, whose weights are read if it
    holds any"""
    layers: Count = 4
    """transformer blocks"""
    hidden: Count = 128
    """width of the residual stream, a multiple of heads"""
    heads: Count = 4
    """attention heads of each block"""
    kv_heads: Count | None = None
    """llama's key and value heads, shared by equally many query heads each; none: as many as heads"""
    inner: Count | None = None
    """width inside llama's MLP, or inside each expert; none: 2/3 · 4 · hidden, rounded up to a multiple of
    256"""
    experts: Count | None = None
    """llama's experts in each block, between which a router divides the tokens; none: one MLP"""
    top_k: Count | None = None
    """experts of a token; none: 2, if the model has experts"""
    shared: Annotated[int, Field(ge=0)] = 0
    """width inside the experts that all tokens of a block share; 0: there are none"""
    vocab: Annotated[int, Field(ge=2)] | None = None
    """tokens in the vocabulary; none: as many as the tokenizer has"""
    context: Count = 128
    """tokens in a sequence; of a model in a folder, if not given, as many as the longest conversation of the
    data has, or 1024"""
    tied: bool | None = None
    """whether the head shares the embedding's weight; none: as the family does, gpt2 yes, llama no"""
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, given: object) -> object:
        name = given.get("name", OWN_MODELS[0]) if isinstance(given, dict) else OWN_MODELS[0]
        return given if name in OWN_MODELS or not isinstance(name, str) else _with_folder_sizes(given)

    def decoder(self, vocab: int) -> Decoder:
        """Return the sizes of plait's own model with `vocab` tokens. Raises ModelError where none fits."""
        given = self.model_dump(exclude={"name", "lora", "vocab"})
        for name in ("tied", "top_k"):  # a default of the family, or of all models
            if given[name] is None:
                del given[name]
        return Decoder.of_family(cast(Family, self.name), vocab=vocab, **given)

    @property
    def folder(self) -> Path | None:
        """The folder of a Hugging Face model, else None."""
        return None if self.name in OWN_MODELS else Path(self.name).expanduser()


def _with_folder_sizes(given: Any) -> dict[str, Any]:
    """Return the fields that are given, completed with the sizes in the folder that their `name` names."""
    name = given["name"]
    reason = invalid_path(name)
    if reason is not None:
        raise ConfigError(f"model.name is {name[:60]!r}…, {reason}: give another path.")
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.name = {name!r} is neither {' nor '.join(OWN_MODELS)} nor a folder with a config.json: "
            f"give one of these{hub_remedy(name)}."
        )
    # Late: it imports torch and transformers, which other configurations need not wait for.
    from plait.models.huggingface.pretrained import sizes_in

    try:
        sizes = sizes_in(folder)
    except ModelError as error:
        raise ConfigError(f"model.name = {name!r}: {error}") from None
    if "context" not in given:
        sizes["context"] = min(sizes["context"], USUAL_CONTEXT)
    for field, value in given.items():
        if field == "context" and isinstance(value, int) and 1 <= value <= sizes["context"]:
            sizes["context"] = value
        elif field == "context":
            raise ConfigError(
                f"model.context = {value} does not fit the model in {name}, which takes 1 to "
                f"{sizes['context']} tokens: give a number in between, or leave it out."
            )
        elif field not in ("name", "lora") and value not in (None, sizes.get(field, _default_of(field))):
            actual = f", where it is {sizes[field]}" if field in sizes else ""
            raise ConfigError(
                f"model.{field} = {value} is given with the folder {name}, whose config.json has all "
                f"sizes{actual}: leave it out."
            )
    return {**given, **sizes}


def _default_of(field: str) -> object:
    """Return the default of a field, which saved configurations have where the folder says nothing."""
    known = ModelConfig.model_fields.get(field)
    return None if known is None else known.default


def invalid_path(text: str) -> str | None:
    """Return the reason why `text` is not a valid path, as a clause "which …", or None."""
    if "\0" in text:
        return "which has a zero byte in it"
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        return "which begins with the home of an unknown user"
    if len(os.fsencode(path)) > _MOST_BYTES or any(
        len(os.fsencode(part)) > _MOST_BYTES_A_NAME for part in path.parts
    ):
        return f"which is longer than file systems take ({_MOST_BYTES_A_NAME} bytes a name)"
    return None
