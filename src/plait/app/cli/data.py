"""`plait data`: prepare corpora for training, and inspect them."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from plait.app.cli.arguments import CommandParser, count
from plait.app.data.corpus_manifest import CorpusIndex, require_intact
from plait.app.data.preparation import PreparationProgress, prepare_corpus
from plait.app.data.recorded_tokenizer import recorded_tokenizer, tokenizer_mismatch
from plait.app.data.token_shards import Corpus, open_corpus
from plait.app.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer, printable
from plait.errors import ConfigError, terminal_text

_ABOUT = "Prepares corpora for training, and inspects them."
_ABOUT_PREPARE = """\
Tokenizes text, JSON lines, Parquet or a data set of Hugging Face into token
shards, in several processes. Interrupted, the same command goes on."""
_USAGE_OF_PREPARE = "plait data prepare SOURCE [SOURCE ...] FOLDER --tokenizer PATH [options]"
_EXAMPLES_OF_PREPARE = (
    ("plait data prepare texts/ 'more/*.jsonl' corpus --tokenizer models/llama", ""),
    ("plait train --data.source corpus", "then"),
)
_ABOUT_INSPECT = """\
Shows the counts of a prepared corpus, and its first documents: with their
special tokens, and of conversations what is learnt between ⟦ and ⟧."""
_EXAMPLES_OF_INSPECT = (("plait data inspect corpus --documents 10", ""),)
_SECONDS_BETWEEN_LINES = 5.0
_USUAL_END = "<|endoftext|>"
_SHOWN, _SHOWN_OF_CHATS = (64, 150), (256, 600)
"""Of a document: the most tokens that are decoded, and the most letters that are printed."""


def run(argv: Sequence[str]) -> int:
    """Run the action that `argv` names; return 0. Raises PlaitError for errors that the user can correct."""
    options = parser().parse_args(argv)
    if options.action == "prepare":
        _prepare(options)
    else:
        _inspect(options)
    return 0


def parser() -> CommandParser:
    """Return the parser of the actions of `plait data`: prepare, inspect."""
    made = CommandParser("plait data", description=_ABOUT)
    summary = "tokenize a corpus for training"
    prepare = made.add_action(
        "prepare", summary, description=_ABOUT_PREPARE, examples=_EXAMPLES_OF_PREPARE, usage=_USAGE_OF_PREPARE
    )
    _add_options_of_prepare(prepare)
    summary = "show what a prepared corpus holds"
    inspect = made.add_action("inspect", summary, description=_ABOUT_INSPECT, examples=_EXAMPLES_OF_INSPECT)
    add = inspect.add_argument
    add("folder", metavar="FOLDER", type=Path, help="a folder that `plait data prepare` has written")
    add("--tokenizer", metavar="PATH", help="to show text (default: that of the corpus)")
    add("--documents", metavar="N", type=count, default=3, help="documents to show (default: 3)")
    return made


def _add_options_of_prepare(prepare: CommandParser) -> None:
    add = prepare.add_argument
    about = "a file, folder, glob, or data set: its folder, or its name as hf://OWNER/NAME:SPLIT"
    add("source", metavar="SOURCE", nargs="+", help=about)
    add("folder", metavar="FOLDER", type=Path, help="the folder to write, empty or new")
    about = "bytes, or the path of a tokenizer.json or its folder"
    add("--tokenizer", metavar="PATH", required=True, help=about)
    add("--processes", metavar="N", type=count, default=os.cpu_count() or 1, help="default: one a core")
    add(
        "--column",
        metavar="NAME",
        help="field of JSON lines, column of tables that holds the text (default: text, but messages, or "
        "prompt and completion, where there are such)",
    )
    add("--lines", action="store_true", help="each line of a text file is a document")
    add("--end", metavar="TOKEN", help="after each document (default: the tokenizer's; '' for none)")
    add("--shard", type=count, metavar="MIB", help="text in a shard (default: by the corpus's size, 1 to 64)")


def _prepare(options: Namespace) -> None:
    _require_outside(options.folder, options.source)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown, began = _ShownProgress(console), time.monotonic()
    with shown:
        index = prepare_corpus(
            options.source,
            options.folder,
            options.tokenizer,
            processes=options.processes,
            column=options.column,
            lines=options.lines,
            end=options.end,
            portion=None if options.shard is None else options.shard << 20,
            report=shown.report,
        )
    seconds = max(time.monotonic() - began, 1e-9)
    speed = shown.read / 1e6 / seconds
    console.print(f"{terminal_text(_described(index))}. {speed:.1f} MB/s in {seconds:.0f} s.")
    if not index.chats:
        tokenizer = open_tokenizer(options.tokenizer)
        console.print(terminal_text(_end_line(index, tokenizer)))
        if isinstance(tokenizer, FileTokenizer) and (unwritten := tokenizer.unwritten_start()):
            console.print(
                "Beginning of a document: none (tokenizer_config.json has add_bos_token, and the "
                f"tokenizer.json, which counts, has no {unwritten} in its post_processor)"
            )
    console.print(f"Train on it: plait train --data.source {options.folder}")


def _require_outside(folder: Path, sources: Sequence[str]) -> None:
    """Raise ConfigError where `folder` lies in a source: the corpus would be read as a part of it."""
    for source in sources:
        read = Path(source).expanduser().resolve()
        if read.is_dir() and read in folder.resolve().parents:
            raise ConfigError(f"{folder} lies in the source {source!r}: choose a folder outside of it.")


def _inspect(options: Namespace) -> None:
    corpus, index = open_corpus(options.folder)
    require_intact(options.folder, index)
    name = options.tokenizer or recorded_tokenizer(str(options.folder))
    tokenizer = open_tokenizer(name) if name else None
    mismatch = "" if tokenizer is None else tokenizer_mismatch(options.folder, index, tokenizer)
    if mismatch:
        raise ConfigError(f"{mismatch}: leave --tokenizer out, or give the corpus's own.")
    print(terminal_text(f"{_described(index)}."))
    print(terminal_text(f"Tokenizer: {index.tokenizer}, vocabulary {index.vocab:,}, {index.dtype}."))
    if not index.chats:
        print(terminal_text(_end_line(index, tokenizer)))
    first = 0
    for number in range(min(options.documents, index.documents)):
        length = corpus.document_length(first)
        print(f"document {number}, {length:,} tokens: {_beginning(corpus, first, length, tokenizer)}")
        first += length


def _beginning(corpus: Corpus, first: int, length: int, tokenizer: Tokenizer | None) -> str:
    """Return the first tokens of a document as text, or as numbers; of chats with ⟦ and ⟧ around answers."""
    chats = corpus.answers(first, 1) is not None
    most, letters = _SHOWN_OF_CHATS if chats else _SHOWN
    count = min(length, most)
    tokens = corpus.read(first, count).tolist()
    answers = corpus.answers(first, count)
    marks = [False] * count if answers is None else answers.tolist()
    shown = ""
    for is_answer, run in groupby(zip(marks, tokens, strict=True), key=itemgetter(0)):
        numbers = [token for _, token in run]
        text = (
            " ".join(map(str, numbers)) + " "
            if tokenizer is None
            else printable(tokenizer.decode(numbers, special=True))
        )
        shown += f"⟦{text}⟧" if is_answer else text
    return shown[:letters] if tokenizer is None else repr(shown)[:letters]


def _end_line(index: CorpusIndex, tokenizer: Tokenizer | None) -> str:
    """Return the line that names the token after each document."""
    if index.end is not None:
        name = f"token {index.end}" if tokenizer is None else tokenizer.token(index.end)
        return f"End of a document: {name}"
    if index.tokenizer == "bytes":
        return "End of a document: none (bytes have no token for it)"
    return f"End of a document: none (give --end '{_USUAL_END}', or the token of your tokenizer)"


def _described(index: CorpusIndex) -> str:
    kind = "conversation" if index.chats else "document"
    shards = _counted(len(index.shards), "shard")
    parts = [f"{_counted(index.documents, kind)}, {index.tokens:,} tokens in {shards}"]
    if index.chats:
        parts[0] += f", {index.count('answers'):,} of them in answers"
    if unanswered := index.count("unanswered"):
        roles = index.names("unknown_roles")
        named = f" (no answers to plait: the roles {roles})" if roles else ""
        parts.append(f"{unanswered:,} without an answer{named}")
    return "; ".join([*parts, *index.notes()])


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


class _ShownProgress:
    """Context manager that shows the progress of a preparation: a bar on a terminal, else lines."""

    def __init__(self, console: Console) -> None:
        self.read = 0
        """The bytes that this call has read."""
        self._console = console
        columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=None)
        self._first: int | None = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> _ShownProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def report(self, done: PreparationProgress, total: int) -> None:
        """Show the counts of the finished shards."""
        if self._first is None:
            self._first = done.size
            if done.size:
                self._console.print(f"Goes on after {done.size / 1e6:,.0f} MB that are finished.")
        self.read = done.size - self._first
        size = f"{done.size / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        text = f"{size}, {done.documents:,} documents, {done.tokens:,} tokens"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done.size, total=total, description=text)
        elif time.monotonic() - self._printed_at > _SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            print(text, file=sys.stderr)
