"""Models in a folder that `save_pretrained` of transformers wrote: their sizes, layers and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError, PlaitError, listed, missing_package
from plait.models.huggingface import FAMILIES, from_huggingface
from plait.models.huggingface.expert_tensors import joined_experts
from plait.models.huggingface.quantized_weights import QUANTIZATION, dequantized, require_known_quantization
from plait.models.huggingface.weight_files import CONFIG, NO_WEIGHTS, SIZE_KEYS, config_in, files_of_tensors
from plait.models.layers.layer_sequence import saved_tensors
from plait.models.lora import adapters_of
from plait.plan.decoder_sizes import MOST_BLOCKS, MOST_SIZE

_MOST_LISTED = 5
_MOST_OF_A_REASON = 200
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them; numbers of others have scales that are elsewhere."""
_ROWS_AT_ONCE = 4096
_FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json with a number of layers that predict further tokens."""
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes of the model in `folder` and the flag `tied`, by plait's argument names.

    Raises ModelError where `config.json` is unreadable.
    """
    config = _config(folder)
    try:
        sizes = {name: getattr(config, key) for name, key in SIZE_KEYS.items()}
        tied = bool(config.tie_word_embeddings)
    except AttributeError as error:
        raise ModelError(
            f"{folder / CONFIG} is that of a {type(config).__name__}, whose sizes plait cannot read "
            f"({error}): give the folder of one of {', '.join(FAMILIES)}."
        ) from None
    for name, size in sizes.items():
        most = MOST_BLOCKS if name == "layers" else MOST_SIZE
        if type(size) is not int or not 1 <= size <= most:
            raise ModelError(
                f"{folder / CONFIG} has {size!r} for {name}: give a whole number from 1 to {most}."
            )
    return sizes | {"tied": tied}


def model_in(folder: Path, context: int | None = None) -> nn.Sequential:
    """Return the model in `folder` as layers on the meta device. Raises ModelError as `from_huggingface`.

    `context`: that of the run, by which layers are divided into stages; None: the longest.
    """
    config = _config(folder)
    if getattr(config, "num_hidden_layers", None) is not None:  # else from_huggingface refuses the model
        sizes_in(folder)
    with torch.device("meta"):
        model = _built(folder, config)
    with _refused_by_transformers(folder):
        layers = from_huggingface(model)
    for module in layers.modules():
        if context is not None and hasattr(module, "cost") and hasattr(module, "context"):
            module.context = context  # type: ignore[assignment]
    return layers


def original_in(folder: Path) -> nn.Module:
    """Return the model in `folder` as transformers builds it, in float32 with random values.

    Experts are computed one after the other, which transformers does in any dtype. Raises ModelError where
    transformers cannot build it.
    """
    return _built(folder, _config(folder), experts_implementation="eager")


def original_of(config: Mapping[str, Any]) -> nn.Module:
    """Return the model that transformers builds of the content of a config.json, with random values."""
    transformers = _transformers()
    kind = config["model_type"]
    made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    built: nn.Module = transformers.AutoModelForCausalLM.from_config(made, trust_remote_code=False)
    return built


def logits_of(model: Any, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the logits of a model of transformers, which runs once for each packed document.

    `inputs`: tokens `[rows, length]`, or these as `tokens` beside `document_ids` of the same shape.
    """
    if isinstance(inputs, Tensor):
        logits: Tensor = model(inputs, use_cache=False).logits
        return logits
    rows = []
    for tokens, ids in zip(inputs["tokens"], inputs["document_ids"], strict=True):
        _, lengths = ids.unique_consecutive(return_counts=True)
        documents = tokens.split(lengths.tolist())
        rows.append(torch.cat([model(one[None], use_cache=False).logits[0] for one in documents]))
    return torch.stack(rows)


def weights_in(folder: Path, model: nn.Sequential) -> dict[str, Any] | None:
    """Return the weights in `folder`, by tensor name in `model`, as lazy slices; None if there are none.

    `model` is the result of `model_in`; adapters that `lora` gave it have no values here. The files are those
    that transformers would read. No tensor is read before `parallelize` asks for it. ModelError for files
    that are missing or damaged, for weights in another format, and for those that do not fit `config.json`.
    """
    _transformers()
    from safetensors import safe_open

    file_of = files_of_tensors(folder)
    if not file_of:
        return None
    opened = {name: safe_open(folder / name, framework="pt") for name in sorted(set(file_of.values()))}
    saved = {key: opened[file].get_slice(key) for key, file in file_of.items()}
    slices = joined_experts(folder, dequantized(saved, config_in(folder).get(QUANTIZATION) or {}))
    names: dict[str, str] = model.huggingface_names  # type: ignore[assignment]
    found, used = {}, set()
    for name, full in names.items():
        headless = full.partition(".")[2]  # the name in files of models without a head
        older = full.replace("lm_head.", "embed_out.")  # GPT-NeoX's name in files
        key = next((key for key in (full, headless, older) if key in slices), None)
        if key is not None:
            found[name] = slices[key]
            used.add(key)
    unused = [key for key in slices if key not in used and not key.endswith(NO_WEIGHTS)]
    _require_no_further_layers(folder, unused)
    _require_fit(folder, model, found, unused)
    _require_tied(folder, model, found)
    return found


def _require_no_further_layers(folder: Path, unused: Sequence[str]) -> None:
    """Raise ModelError for layers behind the last one where config.json has such, for further tokens."""
    config = config_in(folder)
    layers = config.get(SIZE_KEYS["layers"])
    numbers = {key: int(match[1]) for key in unused if (match := _LAYER.match(key))}
    further = [key for key, number in numbers.items() if type(layers) is int and number >= layers]
    if further and any(config.get(name) for name in _FURTHER_LAYERS):
        raise ModelError(
            f"the files in {folder} hold layers behind the {layers} of config.json, such as {further[0]}, "
            "which predict further tokens (multi-token prediction) and which plait does not train: load the "
            "model with transformers and save it again, which leaves them out."
        )


def _require_tied(folder: Path, model: nn.Sequential, found: Mapping[str, Any]) -> None:
    """Raise ModelError where the files have unlike values for one parameter, which config.json ties."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        if name in found:
            names.setdefault(id(one), []).append(name)
    for first, *others in names.values():
        for other in others:
            rows = range(0, found[first].get_shape()[0], _ROWS_AT_ONCE)
            blocks = (slice(begin, begin + _ROWS_AT_ONCE) for begin in rows)
            if any(not torch.equal(found[first][one], found[other][one]) for one in blocks):
                raise ModelError(
                    f"config.json in {folder} ties {other} to {first} (tie_word_embeddings), and its files "
                    "hold other values for it: set tie_word_embeddings to false there, to train both, or "
                    "remove the one that is wrong from the files."
                )


def _require_fit(folder: Path, model: nn.Sequential, found: Mapping[str, Any], unused: list[str]) -> None:
    """Raise ModelError unless the files have exactly the model's tensors, in their shapes."""
    tensors = model.state_dict(keep_vars=True)
    present = {id(one) for name, one in tensors.items() if name in found}
    present |= {id(half) for one in adapters_of(model).values() for half in one.halves.values()}
    faults = [f"{name} is missing" for name, one in saved_tensors(model).items() if id(one) not in present]
    faults += [
        f"{name} is {list(one.get_shape())} and not {list(tensors[name].shape)}"
        for name, one in found.items()
        if list(one.get_shape()) != list(tensors[name].shape)
    ]
    faults += [
        f"{name} holds {one.get_dtype()}" for name, one in found.items() if one.get_dtype() not in _FLOATS
    ]
    faults += [f"{key} is unexpected" for key in unused]
    if faults:
        raise ModelError(
            f"the weights in {folder} do not fit its config.json "
            f"({listed(faults, between='; ', most=_MOST_LISTED)}): give a folder that is whole."
        )


def _built(folder: Path, config: Any, **options: str) -> nn.Module:
    """Return the transformers model that `config`, read from `folder`, describes."""
    auto = _transformers().AutoModelForCausalLM
    with _refused_by_transformers(folder):
        built: nn.Module = auto.from_config(config, trust_remote_code=False, **options)
        return built


@contextmanager
def _refused_by_transformers(folder: Path) -> Iterator[None]:
    """Context: raise ModelError for any error of transformers."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers cannot build the model of {folder / CONFIG}: {_brief(error)}."
        ) from None


def _config(folder: Path) -> Any:
    """Return the configuration in `folder`, of a class of transformers: code in the folder is never run.

    It says nothing of a quantization, since weights are read as what they stand for; ModelError for others.
    """
    transformers, content = _transformers(), config_in(folder)
    try:
        made = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if getattr(made, QUANTIZATION, None):
            require_known_quantization(folder, content.get(QUANTIZATION) or {})
            delattr(made, QUANTIZATION)
        return made
    except PlaitError:
        raise
    except Exception as error:  # any error of transformers
        reason = _brief(error)
        if "auto_map" in content:
            reason = "it needs Python code in that folder (auto_map), which plait does not run"
        raise ModelError(f"{folder / CONFIG} describes no model of transformers: {reason}.") from None


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_OF_A_REASON].rstrip(".") or type(error).__name__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        what = f"a model of Hugging Face in a folder ({error})"
        raise ModelError(f"{missing_package(what, 'transformers', 'huggingface')}.") from None
    return transformers
