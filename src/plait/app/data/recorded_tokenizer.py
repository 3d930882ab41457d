"""The tokenizer of a prepared corpus, whose files `plait data prepare` copies into the folder `tokenizer`.

Imports no NumPy, so that a configuration can name its tokenizer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from plait.app.data.json_files import read_json_object
from plait.app.data.whole_files import whole_file
from plait.errors import DataError
from plait.files import read_bytes

FOLDER = "tokenizer"
"""The folder within that of the corpus; it is not there for bytes."""
TOKENIZER = "tokenizer.json"
_INDEX = "index.json"
_BESIDE = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's chat templates but the default one."""


def tokenizer_files(tokenizer: str) -> Mapping[str, Path]:
    """Return the files of a tokenizer that are there, by their names; none of bytes.

    `tokenizer`: bytes, or the path of a `tokenizer.json`, under whatever name, or of its folder.
    """
    path = Path(tokenizer).expanduser()
    path = path / TOKENIZER if path.is_dir() else path
    if tokenizer == "bytes" or not path.is_file():
        return {}
    beside = {name: path.parent / name for name in _BESIDE}
    templates = sorted((path.parent / _NAMED_TEMPLATES).glob("*.jinja"))
    beside |= {f"{_NAMED_TEMPLATES}/{one.name}": one for one in templates}
    return {TOKENIZER: path} | {name: one for name, one in beside.items() if one.is_file()}


def files_hash(tokenizer: str) -> str:
    """Return a text that changes with the content of a tokenizer's files; empty for bytes. Raises OSError."""
    files = tokenizer_files(tokenizer)
    try:
        contents = {name: read_bytes(path) for name, path in files.items()}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}): mend or remove it.") from None
    hashes = [f"{name} {sha256(data).hexdigest()}" for name, data in contents.items()]
    return sha256(" ".join(hashes).encode()).hexdigest()[:16] if files else ""


def record_tokenizer(folder: Path, tokenizer: str) -> None:
    """Copy the files of a tokenizer into the folder of a corpus; nothing for bytes."""
    for name, path in tokenizer_files(tokenizer).items():
        copy = folder / FOLDER / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        data = read_bytes(path)
        with whole_file(copy) as file:
            file.write(data)


def recorded_tokenizer(source: str) -> str | None:
    """Return the tokenizer of a prepared corpus: bytes, or its folder; None where it is not recorded."""
    folder = Path(source).expanduser()
    if (folder / FOLDER / TOKENIZER).is_file() and (folder / _INDEX).is_file():
        return str(folder / FOLDER)
    try:
        name = read_json_object(folder / _INDEX, "prepare it again").get("tokenizer")
    except DataError:  # which whoever reads all of it reports
        return None
    return "bytes" if name == "bytes" else None
