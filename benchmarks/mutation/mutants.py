"""Mutants of a source: one line changed as real mistakes change it, drawn by a seed.

A line of all lines with code is drawn first, then one of the operators that apply to it, then a place.
Docstrings, annotations, imports, asserts and texts are left as they are.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from operators import Change, changes_of


@dataclass(frozen=True)
class Mutant:
    """A change of one line of a file below `src`: what stood there, what stands there now."""

    path: str
    line: int
    operator: str
    before: str
    after: str
    source: str
    """The whole changed file."""

    @property
    def package(self) -> str:
        """The package of plait that the file is in, or nothing for plait's own files."""
        parts = Path(self.path).parts  # src, plait, package, ...
        return parts[2] if len(parts) > 3 else "(top files)"

    def __str__(self) -> str:
        place = f"{self.path.removeprefix('src/plait/')}:{self.line}"
        return f"{place} {self.operator}: {self.before} -> {self.after}"


def draw_mutants(root: Path, seed: int, count: int, only: str = "") -> list[Mutant]:
    """Return `count` mutants of `root/src/plait`, one a line, in files with `only` in their path.

    A line's own text decides when it is drawn and how it is changed: what a seed draws stays where other
    lines change.
    """
    files = {
        str(path.relative_to(root)): path.read_bytes() for path in sorted((root / "src/plait").rglob("*.py"))
    }
    lines = sorted(
        (hash_of, path, line)
        for path in files
        if only in path
        for hash_of, line in _hashes(seed, path, files[path])
    )
    changes: dict[str, dict[int, list[Change]]] = {}
    drawn: list[Mutant] = []
    for hash_of, path, line in lines:
        if len(drawn) == count:
            break
        if path not in changes:
            changes[path] = _changes_by_line(files[path])
        chance = random.Random(hash_of)
        mutant = _choose(chance, path, line, files[path], changes[path].get(line, []))
        if mutant is not None:
            drawn.append(mutant)
    return drawn


def _hashes(seed: int, path: str, source: bytes) -> Iterator[tuple[str, int]]:
    """Yield a hash of the seed, the file, a line's text and how often that came, and the line."""
    texts, came = source.decode().splitlines(), Counter[str]()
    for line in _code_lines(source):
        text = texts[line - 1].strip()
        came[text] += 1
        yield sha256(f"{seed} {path} {text} {came[text]}".encode()).hexdigest(), line


def _choose(chance: random.Random, path: str, line: int, source: bytes, found: list[Change]) -> Mutant | None:
    """Return a mutant of a line by an operator at random, or None where no operator applies."""
    by_operator: dict[str, list[Change]] = defaultdict(list)
    for change in found:
        by_operator[change.operator].append(change)
    for operator in chance.sample(sorted(by_operator), len(by_operator)):
        change = chance.choice(by_operator[operator])
        text = (source[: change.begin] + change.text.encode() + source[change.end :]).decode()
        try:
            compile(text, path, "exec")
        except SyntaxError:
            continue
        before = re.sub(r"\s+", " ", source[change.begin : change.end].decode())
        return Mutant(path, line, operator, _short(before), _short(change.text), text)
    return None


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _changes_by_line(source: bytes) -> dict[int, list[Change]]:
    by_line: dict[int, list[Change]] = defaultdict(list)
    for change in changes_of(source):
        by_line[change.line].append(change)
    return by_line


def _code_lines(source: bytes) -> list[int]:
    """Return the numbers of lines with statements, without those that only declare or import."""
    return sorted(set(_lines_within(ast.parse(source))))


_DECLARES = ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.Global | ast.Nonlocal


def _lines_within(tree: ast.AST) -> Iterator[int]:
    for node in ast.iter_child_nodes(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, _DECLARES):
            continue
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.If | ast.While):
            yield from range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1)
        elif isinstance(node, ast.For):
            yield node.lineno
        yield from _lines_within(node)
