"""`rules_from_torch`: translates a plan for torch's `parallelize_module` into rules of plait.

    torch                                                      plait
    ColwiseParallel()                                          column
    ColwiseParallel() on the model's last linear               vocabulary
    ColwiseParallel(output_layouts=Replicate())                the same, with gather_output
    RowwiseParallel()                                          row
    RowwiseParallel(input_layouts=Replicate())                 row, without input_is_parallel
    the same on an embedding                                   vocabulary
    PrepareModule… with Replicate() throughout                 no rule

A plan gives the layouts of inputs and outputs, rules only the partitioned modules: layouts that rules cannot
express are refused. A plan does not say which features belong together (heads), nor which linears share an
input, so that one all-reduce of its gradient is enough. Both can be added to the rules with `by` and
`entrance`; otherwise features are partitioned one by one, and each linear reduces by itself.
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
from plait.plan.rules import Rule, column, entrance, match, row, vocabulary

_WHOLE = (Replicate(),)
_CUT = (Shard(-1),)


def rules_from_torch(plan: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, Rule]:
    """Return rules equivalent to `plan` in `parallelize_module(model, mesh, plan)`.

    The rules have the keys of the plan, so that they can be refined: `rules[key] = rules[key].by("heads")`.
    A key with a wildcard inside a name, or for modules that need different rules, is replaced by the full
    paths. Raises PlanError with path, style and option for what plait would compute differently, and for a
    key that matches no module (where torch only warns).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    head = next((path for path in reversed(modules) if isinstance(modules[path], nn.Linear)), None)
    rules: dict[str, Rule] = {}
    for key, style in plan.items():
        found = {path: modules[path] for path in _matching(key, modules)}
        if not found:
            match({key: entrance}, modules)  # raises PlanError with the nearest paths
        translated = {path: _rule(path, module, style, path == head) for path, module in found.items()}
        if len(set(translated.values())) == 1 and all(
            token == "*" or not set(token) & set("*?[") for token in key.split(".")
        ):
            translated = {key: next(iter(translated.values()))}
        rules |= {path: rule for path, rule in translated.items() if rule is not None}
    return rules


def _matching(key: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that match a key as in `parallelize_module`: name by name, with shell wildcards."""
    tokens = key.split(".")
    return [
        path
        for path in paths
        if (path or not key)  # a wildcard does not match the model itself
        and len(names := path.split(".")) == len(tokens)
        and all(map(fnmatchcase, names, tokens))
    ]


def _rule(path: str, module: nn.Module, style: ParallelStyle, is_head: bool) -> Rule | None:
    """Return the rule for a module with this `ParallelStyle`; None where no rule is needed."""
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
        remedy = "give RowwiseParallel(input_layouts=Replicate())"
        raise _refused(path, style, "", "cuts an embedding by features, and plait by rows", remedy)
    if style.input_layouts != _WHOLE:
        raise _differs(path, style, "input_layouts", "the input of a column linear is whole", "Replicate()")
    if style.output_layouts == _WHOLE:
        return Rule("vocabulary" if is_head else "column", gather_output=True)
    if style.output_layouts != _CUT:
        raise _differs(path, style, "output_layouts", "features are cut", "Shard(-1) or Replicate()")
    if not style.use_local_output and not is_head:
        remedy = "leave it out, and let the module count its features or heads by -1"
        reason = "but in plait the output is always this rank's part, a plain tensor"
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


def _prepare(path: str, module: nn.Module, style: Any, is_head: bool) -> None:
    inputs = getattr(style, "prepare_module_input", style)
    if isinstance(inputs, PrepareModuleInput):
        positional = zip(inputs.input_layouts or (), inputs.desired_input_layouts or (), strict=True)
        wanted = inputs.desired_input_kwarg_layouts
        named = ((layout, wanted.get(name)) for name, layout in inputs.input_kwarg_layouts.items())
        _require_replicated(path, inputs, "input_layouts", [*positional, *named])
    outputs = getattr(style, "prepare_module_output", style)
    if isinstance(outputs, PrepareModuleOutput):
        pairs = zip(outputs.output_layouts, outputs.desired_output_layouts, strict=True)
        _require_replicated(path, outputs, "output_layouts", pairs)


def _require_replicated(
    path: str, style: ParallelStyle, option: str, pairs: Iterable[tuple[Any, Any]]
) -> None:
    """Raise PlanError unless the given and desired layouts of `option` are all replicated."""
    for given, wanted in pairs:
        if not {given, wanted} <= {None, Replicate()}:
            raise _refused(
                path,
                style,
                f"turns {given} into {wanted} ({option}),",
                "but in plait inputs and outputs of layers are whole",
                "give Replicate() for both, and use ColwiseParallel and RowwiseParallel for the rest",
            )


def _sequence(path: str, module: nn.Module, style: Any, is_head: bool) -> None:
    remedy = "leave it out, give its neighbours Replicate() for Shard(1), and its layer the rule sequence"
    raise _refused(path, style, "", "cuts the sequence, which is a rule of whole layers", remedy)


_TRANSLATIONS: Mapping[type, Callable[[str, nn.Module, Any, bool], Rule | None]] = {
    ColwiseParallel: _colwise,
    RowwiseParallel: _rowwise,
    PrepareModuleInput: _prepare,
    PrepareModuleOutput: _prepare,
    PrepareModuleInputOutput: _prepare,
    SequenceParallel: _sequence,
}


def _differs(path: str, style: ParallelStyle, option: str, reason: str, fitting: str) -> PlanError:
    """Return the error for an option of a `ParallelStyle` whose value rules cannot express."""
    has = f"has {option} = {', '.join(map(str, getattr(style, option)))},"
    return _refused(path, style, has, f"but in plait {reason}", f"give {fitting}")


def _refused(path: str, style: ParallelStyle, has: str, reason: str, remedy: str) -> PlanError:
    words = (path, "with the style", type(style).__name__, has, reason)
    return PlanError(f"{' '.join(word for word in words if word)}: {remedy}.")
