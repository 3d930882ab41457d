"""The context of a model in a folder, where the configuration gives none: chosen from the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait.app.config.config import Config
from plait.app.config.config_parser import given_values
from plait.app.config.model_section import USUAL_CONTEXT
from plait.app.data.token_shards import open_corpus
from plait.app.train.run_sources import prepared_folder
from plait.models.huggingface.pretrained import sizes_in

MULTIPLE = 64
"""Contexts are multiples of this, so that sequences can be cut over ranks."""
_AT_ONCE = 1 << 20


def with_context_of_data(config: Config, arguments: Sequence[str]) -> tuple[Config, str]:
    """Return the configuration with a context chosen from its data, and a sentence about it.

    Of conversations the longest one, rounded up; of other data 1,024 tokens; at most what the model in the
    folder takes. The same configuration and "" where `arguments` give `model.context`, the model is plait's
    own, or it takes no more. Tokenizes records, unless they are.
    """
    folder = config.model.folder
    if folder is None or "model.context" in given_values(arguments):
        return config, ""
    most = sizes_in(folder)["context"]
    sources = [*config.data.sources, *config.data.validation_sources.values()]
    lengths = [_longest_conversation(config, source) for source in sources]
    longest = max((one for one in lengths if one is not None), default=0)
    usual = USUAL_CONTEXT if None in lengths else 0
    context = min(most, max(usual, -(-longest // MULTIPLE) * MULTIPLE))
    changed = config.model_copy(update={"model": config.model.model_copy(update={"context": context})})
    if context == most:
        return changed, ""
    why = f" for conversations of up to {longest:,}" if longest else ""
    return changed, (
        f"Context: {context:,} tokens a sequence{why}, of the {most:,} that the model takes; "
        "set model.context for another."
    )


def _longest_conversation(config: Config, source: str) -> int | None:
    """Return the number of tokens of the longest conversation in a source; None for other data."""
    folder = prepared_folder(config, source)
    if folder is None:
        return None
    corpus, index = open_corpus(folder)
    if not index.chats:
        return None
    longest, before = 0, 0
    for first in range(0, index.documents, _AT_ONCE):
        ends = corpus.document_ends(first, min(first + _AT_ONCE, index.documents))
        longest, before = max(longest, int(np.diff(ends, prepend=before).max())), int(ends[-1])
    return longest
