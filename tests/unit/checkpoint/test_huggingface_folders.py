"""Folders of Hugging Face: models go there and come back, and compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import plait
from mutated_files import ELSEWHERE
from parity import huggingface_cases as cases
from parity.memory import MEASURED, Watching, anonymous
from parity.one_rank import (
    CONTEXT,
    HEADS,
    MODELS,
    SIZES,
    VOCAB,
    change,
    cut,
    lively,
    loaded,
    saved,
    tensors_in,
)
from parity.pairs import in_quick, in_turns
from plait.checkpoint.full_tensors import FullTensors
from plait.checkpoint.huggingface.config_json import _rope_base, sizes_from_manifest
from plait.checkpoint.huggingface.export_import import export_adapted, export_own, import_folder
from plait.errors import CheckpointError
from plait.models.huggingface.pretrained import model_in, weights_in
from plait.models.huggingface.weight_files import INDEX
from plait.models.rotary import rotary_angles
from plait.plan.decoder_sizes import ROPE_BASE, Decoder

pytestmark = pytest.mark.transformers

TOKENS = torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
NAMES = {name: name for name in MODELS}
SMALL_FILES = 20_000
"""Bytes: less than half of any of the models, more than any of their tensors."""


def sizes(name: str, path: Path) -> Decoder:
    told: dict[str, Any] = {"heads": HEADS[name]}
    if name.startswith("llama"):
        told |= {"context": CONTEXT, "rope_base": 500.0 if name == "llama" else None}
    return sizes_from_manifest(FullTensors(path).manifest, **told)


def opened(folder: Path) -> Any:
    """The model as transformers loads it, without a name too many or too few."""
    import transformers

    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    assert not any(told.values()), told
    return model.eval()


class Angles(nn.Module):
    """Of rotary embedding, in double precision."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.base = config.rope_parameters["rope_theta"]
        self.size = config.hidden_size // config.num_attention_heads

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        angles = rotary_angles(x.shape[1], self.size, self.base, x)
        return tuple(torch.cat((one, one), dim=-1)[None] for one in angles)


def in_double(model: Any) -> Any:
    """What transformers computes in single precision whatever the model's is: norms and angles of Llama."""
    if model.config.model_type == "llama":
        model.model.rotary_emb = Angles(model.config)
        for block in model.model.layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                setattr(block, name, _norm(getattr(block, name)))
        model.model.norm = _norm(model.model.norm)
    return model


def _norm(theirs: Any) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(theirs.weight), eps=theirs.variance_epsilon)
    norm.weight = theirs.weight
    return norm


def assert_same_logits(ours: nn.Module, theirs: Any) -> None:
    assert next(theirs.parameters()).dtype == torch.float64
    expected = ours(TOKENS)
    torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_double(theirs)(TOKENS).logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "most"), in_turns(NAMES, {"whole": None, "in files": SMALL_FILES}))
def test_transformers_computes_what_was_exported(name: str, most: int | None, tmp_path: Path) -> None:
    model = lively(MODELS[name]())
    path = saved(model, tmp_path / "whole")
    if most:
        path = cut(path, tmp_path / "cut")
    target = tmp_path / "exported"
    export_own(FullTensors(path), target, sizes(name, path), max_bytes=most)
    files = sorted(file.name for file in target.iterdir())
    if most is None:
        assert files == ["config.json", "model.safetensors"]
    else:
        weights = sorted(target.glob("*.safetensors"))
        assert files == ["config.json", *(file.name for file in weights), INDEX]
        assert len(weights) > 2
        assert weights[0].name == f"model-00001-of-{len(weights):05d}.safetensors"
        assert max(file.stat().st_size for file in weights) <= most
        index = json.loads((target / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in model.parameters())
        assert set(index["weight_map"].values()) == {file.name for file in weights}
    assert_same_logits(model, opened(target))


THEIRS = {
    "gpt2": lambda: gpt2(6),
    "gpt2-untied": lambda: gpt2(3, tie_word_embeddings=False),
    "llama": lambda: llama(6, num_key_value_heads=2, rope_parameters={"rope_theta": 500.0}),
    "llama-tied": lambda: llama(4, tie_word_embeddings=True),
}


def gpt2(heads: int, **more: Any) -> nn.Module:
    import transformers

    fixed = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_layer": 2, "n_embd": 24, "n_head": heads}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fixed, **more))


def llama(heads: int, **more: Any) -> nn.Module:
    import transformers

    fixed = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    more = {"rms_norm_eps": 1e-5, "max_position_embeddings": CONTEXT, "num_attention_heads": heads} | more
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fixed, **more))


@pytest.mark.parametrize(("name", "shard"), in_turns(NAMES, {size: size for size in ("20KB", "1GB")}))
def test_plait_computes_what_was_imported(name: str, shard: str, tmp_path: Path) -> None:
    """And exported again it is what it was, bit by bit."""
    theirs = lively(THEIRS[name]())
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / INDEX).exists() == (shard == "20KB")
    most = None if shard == "1GB" else SMALL_FILES
    found = import_folder(tmp_path / "theirs", tmp_path / "ours", max_bytes=most)
    assert found == sizes_from_manifest(FullTensors(tmp_path / "ours").manifest)
    assert found.layers == SIZES["layers"]
    assert_same_logits(loaded(MODELS[name], tmp_path / "ours"), theirs)
    export_own(FullTensors(tmp_path / "ours"), tmp_path / "again", found)
    again, before = (opened(tmp_path / folder).state_dict() for folder in ("again", "theirs"))
    assert again.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in again.items())


@pytest.mark.parametrize(
    "name",
    in_quick(
        (
            *("gpt2", "llama-tied-biased", "qwen2", "gpt-neox", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"),
            *("smollm3", "mixtral", "qwen2-moe-partly-dense", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3"),
        ),
        *("gpt2", "phi3", "gemma3", "mixtral", "gpt-oss", "deepseek-v3"),
    ),
)
def test_a_model_of_transformers_that_plait_trained_goes_back(name: str, tmp_path: Path) -> None:
    theirs = lively(cases.MODELS[name](), torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    (tmp_path / "theirs" / "vocab.json").symlink_to("tokenizer.json")
    (tmp_path / "theirs" / "merges.txt").symlink_to(ELSEWHERE)
    (tmp_path / "theirs" / "additional_chat_templates").symlink_to(Path(ELSEWHERE).parent)
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "kept.safetensors")
    change(tmp_path / "theirs" / "config.json", transformers_weights="kept.safetensors", a_key_of_others=1)
    adapted = model_in(tmp_path / "theirs")
    names: Any = adapted.huggingface_names
    values = {name: theirs.state_dict()[other] for name, other in names.items()}
    read = weights_in(tmp_path / "theirs", adapted)
    assert read is not None
    assert all(torch.equal(one[:], values[name]) for name, one in read.items())
    path = saved(adapted, tmp_path / "ours", values=values)
    export_adapted(FullTensors(path), tmp_path / "again", adapted, tmp_path / "theirs")
    for copied in ("tokenizer.json", "vocab.json"):
        assert (tmp_path / "again" / copied).read_text() == "{}"
    assert not (tmp_path / "again" / "merges.txt").exists(), "a link that leads out of the folder"
    again = opened(tmp_path / "again")
    assert again.config.a_key_of_others == 1
    tokens = TOKENS[:, :6] % 20
    assert torch.equal(again(tokens).logits, opened(tmp_path / "theirs")(tokens).logits)


@pytest.mark.parametrize(
    ("name", "joined"),
    in_turns(
        {
            name: name
            for name in ("mixtral", "qwen2-moe-partly-dense", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3")
        },
        {"an expert a tensor": False, "all experts in one": True},
    ),
)
def test_experts_are_exported_as_transformers_saves_them(name: str, joined: bool, tmp_path: Path) -> None:
    theirs = lively(cases.MODELS[name](), torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=not joined)
    adapted = model_in(tmp_path / "theirs")
    path = saved(adapted, tmp_path / "ours", values=weights_in(tmp_path / "theirs", adapted))
    export_adapted(FullTensors(path), tmp_path / "again", adapted, tmp_path / "theirs")
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "again"))
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    assert any("experts.0." in key for key in after) != (joined or name == "gpt-oss")


def test_the_correction_of_a_router_keeps_its_dtype_in_an_export(tmp_path: Path) -> None:
    """As in transformers, which keeps it in float32 whatever the dtype of the model is."""
    lively(cases.MODELS["deepseek-v3"](), torch.float32).save_pretrained(tmp_path / "theirs")
    adapted = model_in(tmp_path / "theirs")
    values = weights_in(tmp_path / "theirs", adapted)
    path = saved(adapted, tmp_path / "ours", values=values)
    narrow = {"dtype": torch.bfloat16}
    export_adapted(FullTensors(path), tmp_path / "again", adapted, tmp_path / "theirs", **narrow)
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "again"))
    corrections = {key for key in after if key.endswith("e_score_correction_bias")}
    assert corrections == {key for key, one in after.items() if one.dtype == torch.float32}
    assert all(torch.equal(after[key], before[key]) and before[key].any() for key in corrections)
    assert corrections


def test_experts_trained_from_random_values_are_exported_as_transformers_saves_a_new_model(
    tmp_path: Path,
) -> None:
    theirs = lively(cases.MODELS["mixtral"](), torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    adapted = model_in(tmp_path / "theirs")
    export_adapted(
        FullTensors(saved(adapted, tmp_path / "ours")), tmp_path / "again", adapted, tmp_path / "theirs"
    )
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in expected.items()
    }


def test_export_to_hugging_face_converts_the_dtype_and_copies_the_tokenizer(tmp_path: Path) -> None:
    model = lively(MODELS["llama"]())
    path = saved(model, tmp_path / "ours")
    (given := tmp_path / "words.json").write_text("{}")
    tokenizer = {"tokenizer.json": given}
    export_own(
        FullTensors(path),
        tmp_path / "half",
        sizes("llama", path),
        dtype=torch.bfloat16,
        tokenizer=tokenizer,
        end=3,
    )
    assert (tmp_path / "half" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "half" / "config.json").read_text())["eos_token_id"] == 3
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], model.head.output.weight.bfloat16())
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert opened(tmp_path / "half").dtype == torch.bfloat16
    import_folder(tmp_path / "half", tmp_path / "back", dtype=torch.float32)
    head = tensors_in(tmp_path / "back")["model.head.output.weight"]
    assert torch.equal(head, model.head.output.weight.bfloat16().float())


def test_import_reads_published_gpt2_names_without_prefix_and_ignores_mask_buffers(tmp_path: Path) -> None:
    """As the published GPT-2 has them."""
    theirs = lively(THEIRS["gpt2"]())
    theirs.save_pretrained(tmp_path / "theirs")
    from safetensors.torch import save_file

    weights = {key.removeprefix("transformer."): value for key, value in theirs.state_dict().items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": weights["wte.weight"].clone()}
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    import_folder(tmp_path / "theirs", tmp_path / "ours")
    assert_same_logits(loaded(MODELS["gpt2"], tmp_path / "ours"), theirs)


@pytest.mark.full
@pytest.mark.skipif(not MEASURED, reason="there is no measure of memory here")
def test_export_and_import_hold_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = plait.models.gpt2(layers=6, hidden=512, heads=8, vocab=VOCAB, context=CONTEXT)
    path = saved(lively(model, torch.float32), tmp_path / "ours")
    largest = 4 * 512 * 512 * 4  # bytes; all together have 18 times as many
    wholes = FullTensors(path)
    found = sizes_from_manifest(wholes.manifest, heads=8)
    for number in range(2):  # what a first time leaves is not counted
        disk, before = Watching(), anonymous()
        export_own(wholes, tmp_path / f"theirs-{number}", found, disk=disk)
        import_folder(tmp_path / f"theirs-{number}", tmp_path / f"again-{number}", disk=disk)
    assert disk.peak - before < 4 * largest < sum(one.bytes for one in wholes.items()) / 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "say what heads of the model is: give heads"),
        ({"heads": 5}, "cannot have 5 heads: give heads as the model was built with"),
        ({"heads": 6}, "say what context of the model is: give context"),
    ],
)
def test_export_asks_for_model_sizes_that_the_checkpoint_lacks(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = saved(lively(MODELS["llama"]()), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=told):
        sizes_from_manifest(FullTensors(path).manifest, **given)


def test_export_takes_model_sizes_from_the_runs_configuration(tmp_path: Path) -> None:
    config = {"model": {"name": "llama", "heads": 6, "kv_heads": 2, "context": CONTEXT, "vocab": None}}
    path = saved(lively(MODELS["llama"]()), tmp_path / "ours", {"config": config})
    found = sizes_from_manifest(FullTensors(path).manifest)
    assert found == Decoder.of_family("llama", **SIZES, heads=6, kv_heads=2, inner=20)
    with pytest.raises(CheckpointError, match="says that heads is 6 and not 4: leave it out"):
        sizes_from_manifest(FullTensors(path).manifest, heads=4)


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    path = saved(lively(MODELS["gpt2"]()), tmp_path / "ours")
    wrong = Decoder.of_family("gpt2", **{**SIZES, "layers": 1, "heads": 6}, tied=False)
    with pytest.raises(CheckpointError, match=r"unexpected: .*blocks.1.attention.key.bias"):
        export_own(FullTensors(path), tmp_path / "target", wrong)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ours"]


def test_hugging_face_folders_that_plait_cannot_read_are_refused(tmp_path: Path) -> None:
    lively(THEIRS["llama"]()).save_pretrained(tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    as_it_was = config.read_text()
    for changes, told in [
        ({"model_type": "mistral"}, "is of a model of type 'mistral', and plait itself has gpt2 and llama"),
        ({"rms_norm_eps": 1e-6}, "has rms_norm_eps = 1e-06, and plait's own llama has 1e-05: let"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "has rope_type = 'yarn'"),
        ({"attention_bias": True}, "has attention_bias = True"),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings = 'no': give true or false"),
        ({"rope_parameters": [3]}, "has rope_parameters = .3.: give an object with a rope_theta"),
        *(
            ({"rope_parameters": {"rope_theta": base}}, f"has rope_theta = {base}: give a number above 0")
            for base in (0, True)
        ),
        ({"is_causal": False}, "has is_causal = False"),
        ({"vocab_size": "many"}, "has vocab_size = 'many': give a whole number of at least 1"),
        ({"hidden_size": 48, "head_dim": 8}, r"norm.weight is \[24\] and not \[48\]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight is unexpected"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens.weight, though"),
    ]:
        config.write_text(as_it_was)
        change(config, **changes)
        with pytest.raises(CheckpointError, match=told) as refusal:
            import_folder(tmp_path / "theirs", tmp_path / "ours")
        assert "\n" not in str(refusal.value)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["theirs"]


def test_damaged_hugging_face_folders_are_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    with pytest.raises(CheckpointError, match=r"has no config.json: give a folder"):
        import_folder(theirs, tmp_path / "ours")
    lively(THEIRS["llama"]()).save_pretrained(theirs, max_shard_size="20KB")
    shard = next(theirs.glob("model-00002*"))
    whole = shard.read_bytes()
    for damaged in (whole[:-8], whole[:100], b""):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
            import_folder(theirs, tmp_path / "ours")
    index = theirs / "model.safetensors.index.json"
    as_it_was = index.read_text()
    index.write_text(as_it_was.replace(shard.name, f"../{shard.name}"))
    with pytest.raises(CheckpointError, match=f"names '../{shard.name}' for .*, outside of its folder"):
        import_folder(theirs, tmp_path / "ours")
    index.write_text(as_it_was)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing, though"):
        import_folder(theirs, tmp_path / "ours")
    for path in theirs.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has no safetensors: load the model with transformers"):
        import_folder(theirs, tmp_path / "ours")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["theirs"]


def test_the_rotary_base_is_read_from_older_and_newer_configuration_keys(tmp_path: Path) -> None:
    for config, base in [
        ({}, ROPE_BASE),
        ({"rope_theta": 300}, 300.0),
        ({"rope_theta": 300, "rope_parameters": {"rope_theta": 500.0}}, 500.0),
        ({"rope_parameters": {"rope_type": "default"}}, ROPE_BASE),
        ({"rope_scaling": None}, ROPE_BASE),
    ]:
        assert _rope_base(config, tmp_path) == base, config
    for base in (0, -1.0, True, "1", float("inf")):
        with pytest.raises(CheckpointError, match=r"has rope_theta = .*: give a number above 0\."):
            _rope_base({"rope_theta": base}, tmp_path)
