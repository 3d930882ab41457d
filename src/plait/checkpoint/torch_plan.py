"""A plan for torch's `parallelize_module`, read as rules of plait.

    torch                                                      plait
    ColwiseParallel()                                          column
    ColwiseParallel() on the model's last linear               vocabulary
    ColwiseParallel(output_layouts=Replicate())                the same, with gather_output
    RowwiseParallel()                                          row
    RowwiseParallel(input_layouts=Replicate())                 row, without input_is_parallel
    the same on an embedding                                   vocabulary
    PrepareModule…, where all is Replicate()                   nothing is to be done

A plan says where layouts change, rules only what is cut: what means something else is refused. Two things a
plan does not say: what belongs together (heads), and where several linears read one input, so that one sum of
its gradient is enough. Both can be added to the rules, with `by` and `entrance`; without them features are
cut one by one, and each linear sums by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from plait.errors import PlanError
from plait.rules import Rule, column, entrance, match, row, vocabulary

_WHOLE = (Replicate(),)
_CUT = (Shard(-1),)


def rules_from_torch(plan: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, Rule]:
    """The rules that mean to `model` what `plan` means in `parallelize_module(model, mesh, plan)`.

    Keys stay as they are, so that rules can be changed: `rules[key] = rules[key].by("heads")`. Only what has
    a wildcard inside a name, or names modules of several kinds, comes under the full path of each. Raises
    PlanError that names path, style and option for what plait would do differently, and for a key that
    matches no module (which torch only warns of).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    head = next((path for path in reversed(modules) if isinstance(modules[path], nn.Linear)), None)
    rules: dict[str, Rule] = {}
    for key, style in plan.items():
        found = {path: modules[path] for path in _matching(key, modules)}
        if not found:
            match({key: entrance}, modules)  # raises, with the nearest paths
        read = {path: _rule(path, module, style, path == head) for path, module in found.items()}
        kept = {path: rule for path, rule in read.items() if rule is not None}
        plain = all(token == "*" or not set(token) & set("*?[") for token in key.split("."))
        if plain and len(set(read.values())) == 1:
            kept = dict.fromkeys([key], next(iter(kept.values()))) if kept else {}
        rules |= kept
    return rules


def _matching(key: str, paths: Iterable[str]) -> list[str]:
    """The paths that `parallelize_module` would find for a key: name by name, with shell wildcards."""
    tokens = key.split(".")
    return [
        path
        for path in paths
        if (path or not key)  # a wildcard is for what the model holds, not for the model
        and len(names := path.split(".")) == len(tokens)
        and all(map(fnmatchcase, names, tokens))
    ]


def _rule(path: str, module: nn.Module, style: ParallelStyle, is_head: bool) -> Rule | None:
    """What a style says of a module; None: nothing that plait has to be told."""
    translate = _TRANSLATIONS.get(type(style))
    if translate is None:
        raise PlanError(
            f"{path} has the style {type(style).__name__}, which plait cannot read: give one of "
            f"{', '.join(one.__name__ for one in _TRANSLATIONS)}, or rules of plait.rules."
        )
    if isinstance(style, ColwiseParallel | RowwiseParallel) and type(module) not in (nn.Linear, nn.Embedding):
        raise PlanError(
            f"{path} has the style {type(style).__name__}, but is a {type(module).__name__}: name the "
            "nn.Linear or nn.Embedding in it."
        )
    return translate(path, module, style, is_head)


def _colwise(path: str, module: nn.Module, style: Any, is_head: bool) -> Rule:
    if isinstance(module, nn.Embedding):
        raise _refused(path, style, "", "cuts an embedding by features, and plait by rows", _BY_ROWS)
    if style.input_layouts != _WHOLE:
        raise _differs(path, style, "input_layouts", "the input of a column linear is whole", "Replicate()")
    if style.output_layouts == _WHOLE:
        return Rule("vocabulary" if is_head else "column", gather_output=True)
    if style.output_layouts != _CUT:
        raise _differs(path, style, "output_layouts", "features are cut", "Shard(-1) or Replicate()")
    if not style.use_local_output and not is_head:
        remedy = "leave it out, and let the module count its features or heads by -1"
        reason = "but in plait what follows always sees this rank's piece, a plain tensor"
        raise _refused(path, style, "has use_local_output = False,", reason, remedy)
    return vocabulary if is_head else column


def _rowwise(path: str, module: nn.Module, style: Any, is_head: bool) -> Rule:
    if style.output_layouts != _WHOLE:
        raise _differs(path, style, "output_layouts", "the sum is whole on every rank", "Replicate()")
    if isinstance(module, nn.Embedding):
        if style.input_layouts != _WHOLE:
            raise _differs(path, style, "input_layouts", "every rank looks up all tokens", "Replicate()")
        return vocabulary
    if style.input_layouts == _WHOLE:
        return Rule("row", input_is_parallel=False)
    if style.input_layouts != _CUT:
        raise _differs(path, style, "input_layouts", "features are cut", "Shard(-1) or Replicate()")
    return row


def _prepare_input(path: str, module: nn.Module, style: Any, is_head: bool) -> None:
    positional = zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True)
    wanted = style.desired_input_kwarg_layouts
    named = ((layout, wanted.get(name)) for name, layout in style.input_kwarg_layouts.items())
    _require_whole(path, style, "input_layouts", [*positional, *named])


def _prepare_output(path: str, module: nn.Module, style: Any, is_head: bool) -> None:
    pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    _require_whole(path, style, "output_layouts", pairs)


def _prepare_both(path: str, module: nn.Module, style: Any, is_head: bool) -> None:
    _prepare_input(path, module, style.prepare_module_input, is_head)
    _prepare_output(path, module, style.prepare_module_output, is_head)


def _require_whole(path: str, style: ParallelStyle, option: str, pairs: Iterable[tuple[Any, Any]]) -> None:
    """PlanError where a value is not whole before and after."""
    for given, wanted in pairs:
        if not {given, wanted} <= {None, Replicate()}:
            raise _refused(
                path,
                style,
                f"turns {given} into {wanted} ({option}),",
                "but in plait what enters and leaves a layer is whole",
                "give Replicate() for both, and say the rest with ColwiseParallel and RowwiseParallel",
            )


def _sequence(path: str, module: nn.Module, style: Any, is_head: bool) -> None:
    """Where sequence parallelism would be read."""
    raise _refused(
        path,
        style,
        "",
        "cuts the sequence, which rules say of whole layers",
        "leave it out, give its neighbours Replicate() for Shard(1), and its layer the rule sequence",
    )


_BY_ROWS = "give RowwiseParallel(input_layouts=Replicate())"
_TRANSLATIONS: Mapping[type, Callable[[str, nn.Module, Any, bool], Rule | None]] = {
    ColwiseParallel: _colwise,
    RowwiseParallel: _rowwise,
    PrepareModuleInput: _prepare_input,
    PrepareModuleOutput: _prepare_output,
    PrepareModuleInputOutput: _prepare_both,
    SequenceParallel: _sequence,
}


def _differs(path: str, style: ParallelStyle, option: str, reason: str, fitting: str) -> PlanError:
    """An option of a style that has a value of which rules know nothing."""
    has = f"has {option} = {', '.join(map(str, getattr(style, option)))},"
    return _refused(path, style, has, f"but in plait {reason}", f"give {fitting}")


def _refused(path: str, style: ParallelStyle, has: str, reason: str, remedy: str) -> PlanError:
    words = (path, "with the style", type(style).__name__, has, reason)
    return PlanError(f"{' '.join(word for word in words if word)}: {remedy}.")
