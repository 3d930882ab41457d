"""Model sizes of a configuration for predictions, and the configuration with a given plan as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from plait.app.config.config import Config
from plait.app.data.tokenizer import open_tokenizer
from plait.plan.model_sizes import Decoder
from plait.plan.plan import Plan

SEARCHED = (
    "pp",
    "tp",
    "cp",
    "dp",
    "replicate",
    "strategy",
    "reduce",
    "schedule",
    "chunks",
    "recompute",
    "sequence_parallel",
)
"""Fields of `parallel` that a search of plans decides, besides `train.microbatches`."""


def configured_decoder(config: Config) -> Decoder | None:
    """Return the sizes of the model that a configuration trains; no module is made.

    None where sizes do not say all that a prediction needs: for a model in a folder, adapters or other frozen
    parameters, an optimizer without two moments a parameter, and offloading.
    """
    model, train = config.model, config.train
    adapts, freezes = model.lora.adapts, bool(train.freeze)
    others = model.folder is not None or adapts or freezes or train.optimizer.moments != 2
    if others or config.parallel.offload != "none":
        return None
    return model.decoder(vocabulary(config))


def vocabulary(config: Config) -> int:
    """Return the number of tokens that a configuration's own model knows."""
    return config.model.vocab or open_tokenizer(config.tokenizer).vocab


def config_text(config: Config, plan: Plan) -> str:
    """Return a TOML file of `config` with the searched fields of `plan`; other defaults are left out."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    parallel = tree.setdefault("parallel", {})
    parallel.pop("layers_per_stage", None)
    parallel.update({name: getattr(plan, name) for name in SEARCHED})
    tree.setdefault("train", {})["microbatches"] = plan.microbatches
    return "\n".join(_lines(tree)).strip() + "\n"


def _value(value: object) -> str:
    """Return a value as TOML, which has texts, numbers, truth values and lists of them like JSON."""
    if isinstance(value, dict):
        pairs = (f"{name} = {_value(one)}" for name, one in value.items() if one is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _lines(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    sections = {name: value for name, value in tree.items() if isinstance(value, dict)}
    for name, value in tree.items():
        if name not in sections and value is not None:
            yield f"{name} = {_value(value)}"
    for name, section in sections.items():
        yield from ("", f"[{prefix}{name}]", *_lines(section, f"{prefix}{name}."))
