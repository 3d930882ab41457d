"""Write what a user brings: texts/, chats.jsonl, and model/ (a Llama of Hugging Face with its tokenizer).

.venv/bin/python examples/roads/stand_ins.py FOLDER

They stand in for downloads: modules of Python's standard library, twenty questions and their answers, and a
model that transformers builds from a configuration, with random weights.
"""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

CAPITALS = (
    "Austria Vienna, Belgium Brussels, Chile Santiago, Denmark Copenhagen, Egypt Cairo, France Paris, "
    "Germany Berlin, Hungary Budapest, Italy Rome, Japan Tokyo, Kenya Nairobi, Latvia Riga, Mali Bamako, "
    "Norway Oslo, Oman Muscat, Peru Lima, Qatar Doha, Russia Moscow, Spain Madrid, Turkey Ankara"
)
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_texts(folder: Path, files: int = 40) -> None:
    """Write text files: the first modules of the standard library."""
    folder.mkdir(parents=True)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        shutil.copy(path, folder / f"{path.stem}.txt")


def write_chats(path: Path) -> list[str]:
    """Write conversations, one a line, and return what is said in them."""
    chats = []
    for country, capital in (pair.split() for pair in CAPITALS.split(", ")):
        question, answer = f"What is the capital of {country}?", f"It is {capital}."
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return [message["content"] for chat in chats for message in chat]


def write_model(folder: Path, texts: list[str]) -> None:
    """Write a small Llama with random weights, and a tokenizer that is trained on `texts`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    reader = Tokenizer(models.BPE())
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|start|>", "<|end|>"]
    reader.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=reader, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_texts(target / "texts")
    write_model(target / "model", write_chats(target / "chats.jsonl"))
