"""Whether a tokenizer is the one with which a corpus was prepared."""

from __future__ import annotations

from pathlib import Path

from plait.data.recorded_tokenizer import recorded_tokenizer
from plait.data.token_shards import CorpusIndex
from plait.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer


def tokenizer_mismatch(folder: Path, index: CorpusIndex, tokenizer: Tokenizer) -> str:
    """Return in words how a tokenizer differs from that of the corpus in `folder`, "" where it does not.

    Where the corpus does not record its tokenizer, only the size of the vocabulary is compared.
    """
    is_file = isinstance(tokenizer, FileTokenizer)
    if is_file != (index.tokenizer != "bytes") or tokenizer.vocab != index.vocab:
        return (
            f"{folder} was prepared with {index.tokenizer} (vocabulary {index.vocab:,}), and the tokenizer "
            f"given is {tokenizer.name} (vocabulary {tokenizer.vocab:,})"
        )
    recorded = recorded_tokenizer(str(folder))
    if (
        recorded is None
        or not isinstance(tokenizer, FileTokenizer)
        or tokenizer.path.parent == Path(recorded)
    ):
        return ""
    own = open_tokenizer(recorded)
    if isinstance(own, FileTokenizer) and own.numbers() != tokenizer.numbers():
        return (
            f"{folder} was prepared with another tokenizer than {tokenizer.path}, which gives its tokens "
            "other numbers"
        )
    return ""
