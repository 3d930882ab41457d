"""The operators of mutation: each yields changes of a source that are mistakes as people make them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_AXES = ("dp", "cp", "tp", "pp")
_BOUNDARIES = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "in": "not in",
    "is": "is not",
}
_BOUNDARIES |= {"not in": "in", "is not": "is"}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|"}
_ARITHMETIC |= {"<<": ">>", ">>": "<<", "@": "+", "^": "|"}
_COUNTS = frozenset({"range", "islice", "narrow", "min", "max", "arange"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Change:
    """Bytes `begin` to `end` of a source, which `operator` replaces by `text`; `line`: where they begin."""

    operator: str
    line: int
    begin: int
    end: int
    text: str


def changes_of(source: bytes) -> list[Change]:
    """Return all changes of a source by all operators."""
    return list(_Walk(source).changes())


class _Walk:
    """Positions in a source, by which changes are made while its nodes are visited."""

    def __init__(self, source: bytes) -> None:
        self.source, self.tree = source, ast.parse(source)
        lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def changes(self) -> Iterator[Change]:
        """Yield the changes of all nodes by all operators."""
        yield from self._within(self.tree, (), None)

    def _within(self, node: ast.AST, parents: tuple[ast.AST, ...], function: Any) -> Iterator[Change]:
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.arguments):
            return  # a text's expressions have no positions in Python 3.11
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        inner = node if isinstance(node, _FUNCTIONS) else function
        for operator in _OPERATORS:
            yield from operator(self, node, parents, inner)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._within(child, (*parents, node), inner)

    def text(self, node: Any) -> str:
        return self.source[self.begin(node) : self.end(node)].decode()

    def begin(self, node: Any) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def replaced(self, operator: str, node: Any, text: str) -> Change:
        return Change(operator, node.lineno, self.begin(node), self.end(node), text)

    def sign_between(self, operator: str, left: Any, right: Any, signs: dict[str, str]) -> Iterator[Change]:
        """Yield the change of the sign that stands between two nodes."""
        begin, end = self.end(left), self.begin(right)
        between = self.source[begin:end].decode()
        pattern = "|".join(
            re.escape(sign).replace(r"\ ", r"\s+") for sign in sorted(signs, key=len, reverse=True)
        )
        found = re.search(
            rf"(?<!\w)(?:{pattern})(?!\w)", re.sub(r"#[^\n]*", lambda one: " " * len(one[0]), between)
        )
        if found:
            sign = re.sub(r"\s+", " ", found[0])
            line = left.end_lineno + between[: found.start()].count("\n")
            at = begin + len(between[: found.start()].encode())
            yield Change(operator, line, at, at + len(found[0].encode()), signs[sign])


def _boundary(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for left, right in pairwise([node.left, *node.comparators]):
            yield from walk.sign_between("comparison", left, right, _BOUNDARIES)


def _condition(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        conditions = [node.test]
    elif isinstance(node, ast.comprehension):
        conditions = node.ifs
    else:
        return
    for condition in conditions:
        yield walk.replaced("condition negated", condition, f"(not ({walk.text(condition)}))")


def _and_or(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        for left, right in pairwise(node.values):
            yield from walk.sign_between("and/or", left, right, {"and": "or", "or": "and"})


def _not_dropped(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield walk.replaced("not dropped", node, f"({walk.text(node.operand)})")


def _arithmetic(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.BinOp):
        yield from walk.sign_between("arithmetic", node.left, node.right, _ARITHMETIC)
    if isinstance(node, ast.AugAssign):
        signs = {f"{sign}=": f"{other}=" for sign, other in _ARITHMETIC.items()}
        yield from walk.sign_between("arithmetic", node.target, node.value, signs)


def _off_by_one(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.Slice):
        bounds: Sequence[ast.expr] = [bound for bound in (node.lower, node.upper) if bound is not None]
    elif isinstance(node, ast.Call) and _name_of(node.func) in _COUNTS:
        bounds = [
            one for one in node.args if not isinstance(one, ast.Starred | ast.GeneratorExp | ast.ListComp)
        ]
    else:
        return
    for bound in bounds:
        yield walk.replaced("off by one", bound, f"{walk.text(bound)} + 1")


def _name_of(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def _statement(walk: _Walk, node: ast.AST, parents: tuple[ast.AST, ...], function: Any) -> Iterator[Change]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    if is_call or isinstance(node, ast.AugAssign | ast.Delete | ast.Break | ast.Continue):
        yield walk.replaced("statement removed", node, "pass")
    elif function is not None and isinstance(node, ast.Assign):
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            yield walk.replaced("statement removed", node, "pass")
    elif isinstance(node, ast.Raise):
        yield walk.replaced("check removed", node, "pass")
    elif isinstance(node, ast.Return) and parents[-1] is not function:
        yield walk.replaced("early return removed", node, "pass")


def _arguments(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if isinstance(node, ast.Call):
        for left, right in pairwise(node.args):
            texts = walk.text(left), walk.text(right)
            if texts[0] != texts[1] and not any(
                isinstance(one, ast.Starred | ast.GeneratorExp) for one in (left, right)
            ):
                between = walk.source[walk.end(left) : walk.begin(right)].decode()
                yield Change(
                    "arguments swapped",
                    left.lineno,
                    walk.begin(left),
                    walk.end(right),
                    between.join(texts[::-1]),
                )


def _constant(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if value is True or value is False:
        yield walk.replaced("constant", node, str(not value))
    elif isinstance(value, int):
        yield walk.replaced("constant", node, str(value + 1))
    elif isinstance(value, float):
        yield walk.replaced("constant", node, repr(2 * value or 1.0))
    elif value in _AXES:
        for axis in _AXES:
            if axis != value:
                yield walk.replaced("axis", node, f'"{axis}"')


def _dimension(walk: _Walk, node: ast.AST, *_: Any) -> Iterator[Change]:
    if (
        isinstance(node, ast.keyword)
        and node.arg == "dim"
        and isinstance(node.value, ast.Constant | ast.UnaryOp)
    ):
        text = walk.text(node.value)
        yield walk.replaced("axis", node.value, "0" if text != "0" else "-1")


def _variable(walk: _Walk, node: ast.AST, parents: tuple[ast.AST, ...], function: Any) -> Iterator[Change]:
    """Another argument of the same declared type, or another name of the same assignment."""
    if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and function is not None):
        return
    for names in _kinds(walk, function):
        if node.id in names:
            for other in names:
                if other != node.id:
                    yield walk.replaced("wrong variable", node, other)


def _kinds(walk: _Walk, function: ast.FunctionDef) -> Iterator[list[str]]:
    """Yield names of a function that are of the same kind each."""
    by_type: dict[str, list[str]] = {}
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if argument.annotation is not None:
            by_type.setdefault(walk.text(argument.annotation), []).append(argument.arg)
    yield from by_type.values()
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Tuple):
                yield [
                    one.id for one in target.elts if isinstance(one, ast.Name) and not one.id.startswith("_")
                ]


_Operator = Callable[[_Walk, Any, tuple[ast.AST, ...], Any], Iterator[Change]]
_OPERATORS: tuple[_Operator, ...] = (
    _boundary,
    _condition,
    _and_or,
    _not_dropped,
    _arithmetic,
    _off_by_one,
    _statement,
    _arguments,
    _constant,
    _dimension,
    _variable,
)
