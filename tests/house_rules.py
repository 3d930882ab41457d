"""The rules of the house, as CONTRIBUTING.md describes it. They read the source and do not run it.

A rule takes a `Source` and gives one line per breach: where, what, and how to mend it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__", "loop", "rules"),
    ("app",),
    ("estimate", "verification"),
    ("optimizers",),
    ("engine",),
    ("proof", "checkpoint"),
    ("models",),
    ("tensor",),
    ("pictures", "ranks"),
    ("schedules",),
    ("plan",),
    ("errors", "files", "package"),
)
"""Each room imports rooms of lower floors, and itself."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITHOUT_TORCH = (
    "errors.py",
    "files.py",
    "package.py",
    "plan/",
    "schedules/",
    "pictures/",
    "estimate/time/",
    "estimate/search/",
    "models/huggingface/weight_files.py",
)
"""Rooms, parts of rooms and files that decide on numbers and texts."""
WITH_TORCH = {
    "plan/flat_buffer_specs.py",
    "plan/layout/__init__.py",
    "plan/layout/sequence_layout.py",
    "plan/layout/shards.py",
}
"""Files of theirs that compute on tensors."""
WITH_DISTRIBUTED = {"ranks", "checkpoint", "tensor/parallel/torch_parallelize_plan.py"}
"""Rooms and files that import torch.distributed."""
PRIVATE_USES = {
    (
        "tensor/autograd/private_torch_functions.py",
        "run_backward",
        "_C",
    ): "whether a TorchFunctionMode is on: no public way to ask",
    ("tensor/autograd/private_torch_functions.py", "run_backward", "_len_torch_function_stack"): "likewise",
    (
        "tensor/autograd/private_torch_functions.py",
        "run_backward_unseen",
        "_execution_engine",
    ): "a backward without checks in Python",
    (
        "tensor/autograd/private_torch_functions.py",
        "apply_function",
        "_C",
    ): "whether functorch is on: no public way to ask",
    (
        "tensor/autograd/private_torch_functions.py",
        "apply_function",
        "_are_functorch_transforms_active",
    ): "likewise",
    (
        "tensor/autograd/private_torch_functions.py",
        "",
        "_C",
    ): "whether a TorchDispatchMode is on: no public way to ask",
    ("tensor/autograd/private_torch_functions.py", "", "_len_torch_dispatch_stack"): "likewise",
    (
        "tensor/autograd/private_torch_functions.py",
        "reshaped_in_place",
        "_unsafe_view",
    ): "a result of another shape that is no view",
    (
        "models/layers/stateful_layer_check.py",
        "",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "documented, private by its path",
    (
        "estimate/memory/remembered_results.py",
        "",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "likewise",
    (
        "models/find_float8_only_inputs.py",
        "",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "sees what reads a tensor, also within autograd functions: likewise",
    (
        "tensor/autograd/private_torch_functions.py",
        "hidden_from_function_modes",
        "_C",
    ): "an operation within another is no call that a TorchFunctionMode is to see: documented",
    (
        "models/layers/stateful_layer_check.py",
        "_written",
        "_schema",
    ): "what an operation writes: no public way",
    (
        "tensor/find_module_hooks.py",
        "has_load_hooks",
        "_load_state_dict_pre_hooks",
    ): "no public way to list hooks",
    (
        "ranks/gradient_hook_detection.py",
        "first_gradient_hook",
        "_backward_hooks",
    ): "no public way to list hooks",
    ("ranks/gradient_hook_detection.py", "first_gradient_hook", "_post_accumulate_grad_hooks"): "likewise",
    (
        "engine/compilation/torch_compiler.py",
        "joint_graph",
        "torch._functorch.aot_autograd.aot_export_joint_simple",
    ): "the graph of a forward and its backward: no public way",
    (
        "engine/compilation/torch_compiler.py",
        "",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    ): "tensors without memory on any device: documented, private by its path",
    (
        "ranks/accelerator.py",
        "keep_stand_in_for_gpus",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    ): "entering it makes the stand-in",
    ("engine/compilation/torch_compiler.py", "is_view", "_unsafe_view"): "an operation that shares memory",
    (
        "engine/compilation/torch_compiler.py",
        "with_generated_code",
        "torch._inductor.compile_fx.compile_fx",
    ): "compiles a graph; `torch._inductor.compile` is this without `inner_compile`",
    (
        "engine/compilation/torch_compiler.py",
        "with_generated_code",
        "torch._inductor.compile_fx.compile_fx_inner",
    ): "what generates the code: its result is called without the wrappers around it",
    (
        "engine/compilation/torch_compiler.py",
        "with_generated_code",
        "torch._functorch.config",
    ): "documented, private by its path",
    (
        "engine/compilation/torch_compiler.py",
        "code_cache",
        "torch._inductor.runtime.cache_dir_utils.cache_dir",
    ): "the folder of generated code, wherever the environment puts it: no public way to ask",
    (
        "tensor/attention/fused_kernels.py",
        "_chosen_backend",
        "_fused_sdp_choice",
    ): "which kernel scaled_dot_product_attention takes: no public way to ask",
    (
        "tensor/attention/fused_kernels.py",
        "cpu_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ): "attention with its log-sum-exp: no public way",
    (
        "tensor/attention/fused_kernels.py",
        "_cpu_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "_flash_forward",
        "_scaled_dot_product_flash_attention",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "_flash_backward",
        "_scaled_dot_product_flash_attention_backward",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "_cudnn_forward",
        "_scaled_dot_product_cudnn_attention",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "_cudnn_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "_efficient_forward",
        "_scaled_dot_product_efficient_attention",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "_efficient_backward",
        "_scaled_dot_product_efficient_attention_backward",
    ): "likewise",
    (
        "tensor/attention/fused_kernels.py",
        "forward",
        "_flash_attention_forward",
    ): "attention within documents, by the operation of torch.nn.attention.varlen, which gives no backward",
    (
        "tensor/attention/fused_kernels.py",
        "backward",
        "_flash_attention_backward",
    ): "its backward with a given log-sum-exp: no public way",
    (
        "optimizers/owned_optimizer.py",
        "_require_unchanged",
        "_version",
    ): "whether a parameter was written to: documented, no public name",
    ("optimizers/owned_optimizer.py", "_copy_to_shards", "_version"): "likewise",
    ("optimizers/owned_optimizer.py", "read_parameters", "_version"): "likewise",
    (
        "engine/cuda_graphs/host_reads.py",
        "",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "sees each operation: documented, private by its path",
    (
        "verification/reference/rounding_errors.py",
        "",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "sees the casts inside of layers and of their backward: documented, private by its path",
    (
        "engine/pipeline/recompute.py",
        "versions_of",
        "_version",
    ): "whether a result was written to: no public way",
    (
        "tensor/autograd/private_torch_functions.py",
        "add_each",
        "_foreach_add_",
    ): "adds many tensors at once: no public way but an optimizer's",
    ("tensor/autograd/private_torch_functions.py", "zero_each", "_foreach_zero_"): "likewise",
    ("tensor/autograd/private_torch_functions.py", "multiply_each", "_foreach_mul_"): "likewise",
    (
        "tensor/autograd/regathered_activations.py",
        "version_of",
        "_version",
    ): "whether a layer wrote to what entered: likewise",
    ("tensor/autograd/joined_linears.py", "output", "_version"): "likewise",
    (
        "models/layers/shape_inference.py",
        "_run",
        "_version",
    ): "whether a layer wrote to its input: likewise",
    (
        "engine/pipeline/executor.py",
        "profiling",
        "_profiler_enabled",
    ): "no public way to ask for an active profiler",
    (
        "models/layers/layer_sequence.py",
        "_flatten",
        "_modules",
    ): "named_children leaves out what stands twice",
    (
        "engine/pipeline/recompute.py",
        "_written",
        "_schema",
    ): "what an operation writes to: no public way to ask",
    (
        "engine/pipeline/recompute.py",
        "*",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "sees each operation",
    (
        "proof/position_proof.py",
        "*",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "likewise",
    (
        "proof/position_proof.py",
        "arguments_of",
        "_schema",
    ): "the names of an operation's arguments: likewise",
    (
        "ranks/launch/fork_server.py",
        "_server_process",
        "_forkserver",
    ): "no public way to ask whether there is one",
    ("ranks/launch/fork_server.py", "_server_process", "_forkserver_pid"): "likewise",
    (
        "ranks/launch/fork_server.py",
        "stop_fork_server",
        "_forkserver",
    ): "multiprocessing ends it, but too late",
    ("ranks/launch/fork_server.py", "stop_fork_server", "_stop"): "likewise",
    (
        "ranks/launch/world_membership.py",
        "_end_groups",
        "_world",
    ): "no public way to list the process groups",
    (
        "ranks/failure/failure_log.py",
        "failure_log_of_world",
        "_get_default_store",
    ): "no public way to the store",
    ("ranks/transport/torch_distributed.py", "splits_communicators", "_get_default_group"): "likewise",
    ("ranks/transport/torch_distributed.py", "new_process_group", "_get_default_group"): "likewise",
    (
        "ranks/transport/torch_distributed.py",
        "new_process_group",
        "_new_process_group_helper",
    ): "new_group reuses the names of destroyed groups, or needs every rank of the world",
    ("ranks/transport/torch_distributed.py", "new_process_group", "_world"): "likewise",
    ("ranks/transport/torch_distributed.py", "_nccl_options", "_timeout"): "torch warns where it differs",
    (
        "ranks/transport/torch_distributed.py",
        "timeout_of",
        "_get_backend",
    ): "no public way to a group's timeout",
    ("ranks/failure/operation_watch.py", "write_flight_record", "_C"): "no public way to the flight record",
    ("ranks/failure/operation_watch.py", "write_flight_record", "_distributed_c10d"): "likewise",
    (
        "ranks/transport/torch_distributed.py",
        "set_timeout",
        "_get_backend",
    ): "no public way to the backend of one device type",
    (
        "ranks/transport/torch_distributed.py",
        "set_timeout",
        "_set_default_timeout",
    ): "the name of `set_timeout` before torch 2.13",
    ("ranks/launch/preload.py", "*", "torch._dynamo"): "the fork server loads it once, else every rank would",
}
"""File, function, private name: why there is no public way."""
PUBLIC_NAMES = {"_exit", "_replace"}
"""`os._exit`, and what every named tuple has: documented, in spite of their names."""
FROZEN_VALUES = {
    ("tensor/losses.py", "cross_entropy"): "a frozen dataclass: the loss as a value",
    ("plan/rules.py", "entrance"): "a frozen dataclass: a word of the rules",
    ("plan/rules.py", "column"): "likewise",
    ("plan/rules.py", "row"): "likewise",
    ("plan/rules.py", "vocabulary"): "likewise",
    ("plan/rules.py", "sequence"): "likewise",
    ("plan/rules.py", "piece"): "likewise",
    ("plan/rules.py", "replicated"): "likewise",
    ("plan/rules.py", "partitioned"): "likewise",
    ("plan/rules.py", "norm"): "likewise",
}
"""Lower-case names of values at module level that cannot change."""
IMMUTABLE_MAKERS = {"TypeVar", "ParamSpec", "NewType", "frozenset", "tuple"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear"}
AXIS_NAMES = {"pp", "dp", "replicate", "shard", "cp", "tp", "dp_cp", "shard_cp"}
OF_PLANS_ALONE = {"strategy", "master_precision", "gradient_precision", "reduce_precision"}
DECIDED_ONCE = OF_PLANS_ALONE | {"reduce", "shards", "state_ranks"}
"""Fields of a plan that `parameter_units` turns into the description of each unit, which all else reads: some
have names that nothing else has, so that they are found under any name of the plan."""
READS_THE_PLAN = {
    "plan/plan.py": "checks the fields",
    "plan/parameter_units.py": "decides",
    "plan/axes.py": "names the axes",
    "app/config/config.py": "makes a plan of a configuration",
    "app/cli/plan_html.py": "prints a plan",
    "app/cli/plan_output.py": "prints a plan",
    "estimate/memory/fit_plan.py": "chooses among plans",
    "estimate/memory/memory_report.py": "prints a plan",
    "app/loop/describe_run.py": "prints a plan",
    "estimate/search/plan_changes.py": "chooses among plans",
    "estimate/time/operation_times.py": "places of ranks on hosts, by stride, and the type of an axis",
    "pictures/report/sections.py": "draws a run's files",
    "pictures/report/run_json.py": "the format of a run's files, which may be older than the mesh",
    "pictures/report/plan_pictures.py": "draws a run's files",
    "pictures/report/step_json.py": "draws a run's files",
    "app/train/predicted_run.py": "prints a plan",
    "app/train/one_rank_comparison.py": "the plan of one rank, and its tolerance",
    "verification/diagnosis/cause.py": "the order in which causes are suspected",
    "verification/diagnosis/symptoms.py": "the order in which causes are suspected",
    "verification/expected_dtypes.py": "independent of what it checks",
    "verification/report.py": "prints a plan",
    "verification/verify.py": "prints a rank's place",
}
"""Files that read these fields of a plan, or spell out several axes, and why."""
MOST_LINES, MOST_FUNCTION_LINES = 600, 60
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
ABSOLUTE_PATH = re.compile(r"(?<![\w.~*])/(home|root|tmp|usr|var|etc|opt|mnt|srv|Users|work)/|\b[A-Z]:\\\\")


def room_of(module: str) -> str:
    """Return the room that a module belongs to: `schedules` for `plait.schedules.search.auto_search`."""
    return module.split(".")[1] if "." in module else ""


def part_of(module: str) -> str:
    """Return the part of a room that a module belongs to, a package or a file: `schedules.search`."""
    return ".".join(module.split(".")[1:3])


@dataclass(frozen=True)
class Source:
    """A module of the project: its dotted name, its path below the package, and its text."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, which each rule looks through."""
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        return room_of(self.name)

    def breach(self, line: int, what: str) -> str:
        return f"src/plait/{self.path}:{line}: {what}"

    @cached_property
    def _imports(self) -> list[tuple[int, str, str | None]]:
        """Line, module, and the name that is taken from it."""
        found: list[tuple[int, str, str | None]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += ((node.lineno, alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found += ((node.lineno, self._absolute(node), alias.name) for alias in node.names)
        return found

    def imports(self, modules: Collection[str]) -> Iterator[tuple[int, str]]:
        """`(line, module)` for every import, those for type checking and inside functions too.

        `from plait import models` imports the module `plait.models` if `modules` has it.
        """
        for line, module, name in self._imports:
            inner = f"{module}.{name}"
            yield line, inner if inner in modules or module == "torch" else module

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        kept = package[: len(package) - node.level + self.path.endswith("__init__.py")]
        return ".".join([*kept, *([node.module] if node.module else [])])


class House(dict[str, Source]):
    """Modules by their dotted names."""

    @cached_property
    def imported(self) -> dict[str, set[str]]:
        """By module, which others of the house it imports; the package itself, which names all, none."""
        return {
            name: {module for _, module in source.imports(self) if module in self and name != "plait"}
            for name, source in self.items()
        }

    @cached_property
    def parts_below(self) -> dict[str, set[str]]:
        """By part of a room, which others of the room its modules import."""
        below: dict[str, set[str]] = {}
        for source in self.values():
            below.setdefault(part_of(source.name), set()).update(_other_parts(source, self))
        return below


Rule = Callable[[Source, House], Iterator[str]]


@cache
def house() -> House:
    """Every module of the package by its dotted name."""
    package = ROOT / "src" / "plait"
    sources = House()
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        name = ".".join(["plait", *path.with_suffix("").parts]).removesuffix(".__init__")
        sources[name] = Source(name, path.as_posix(), file.read_text())
    return sources


def _is(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports_go_down(source: Source, house: House) -> Iterator[str]:
    if source.name == "plait":
        return  # the door: it may name any room
    if source.room not in FLOOR_OF:
        yield source.breach(1, f"room {source.room!r} stands in no floor: add it to CONTRIBUTING.md and here")
        return
    for line, module in source.imports(house):
        if module == "plait":
            yield source.breach(line, "imports the package itself: import from the module that has the name")
        elif _is(module, "plait"):
            room = room_of(module)
            above = FLOOR_OF.get(room, -1) <= FLOOR_OF[source.room]
            if room != source.room and above:
                yield source.breach(
                    line, f"{source.room} imports {room}, which is not below it: move the code down or up"
                )


def no_cycles(source: Source, house: House) -> Iterator[str]:
    """A module that is reached from itself, told at each import that leads back."""
    for line, module in source.imports(house):
        reached, waiting = set[str](), [module] if module in house else []
        while waiting:
            current = waiting.pop()
            if current not in reached:
                reached.add(current)
                waiting += house.imported[current]
        if source.name in reached and source.name != "plait":
            yield source.breach(
                line, f"{module} leads back here, a cycle: move what both need to a third module"
            )


def no_cycles_of_parts(source: Source, house: House) -> Iterator[str]:
    """The packages and files of a room in a circle, told at each import that closes it."""
    below, own = house.parts_below, part_of(source.name)
    for line, module in source.imports(house):
        reached, waiting = set[str](), [part_of(module)] if room_of(module) == source.room else []
        waiting = [part for part in waiting if part != own]
        while waiting:
            current = waiting.pop()
            if current not in reached:
                reached.add(current)
                waiting += below.get(current, ())
        if own in reached:
            yield source.breach(line, f"{own} and {part_of(module)} import each other: move what both need")


def _other_parts(source: Source, house: House) -> set[str]:
    """The parts of its own room that a module imports, but for its own; a room's `__init__` is no part."""
    parts = {part_of(module) for _, module in source.imports(house) if room_of(module) == source.room}
    return parts - {part_of(source.name)} if "." in part_of(source.name) else set()


def torch_stays_in_its_rooms(source: Source, house: House) -> Iterator[str]:
    for line, module in source.imports(house):
        if _is(module, "torch.distributed") and WITH_DISTRIBUTED.isdisjoint((source.room, source.path)):
            yield source.breach(line, f"{source.room} imports torch.distributed: use plait.ranks")
        elif _is(module, "torch") and source.path.startswith(WITHOUT_TORCH) and source.path not in WITH_TORCH:
            yield source.breach(line, f"{source.room} imports torch: it decides on numbers, without tensors")
    if WITH_DISTRIBUTED.isdisjoint((source.room, source.path)):
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                yield source.breach(node.lineno, f"{source.room} uses torch.distributed: use plait.ranks")


def devices_in_one_room(source: Source, house: House) -> Iterator[str]:
    if source.path == "ranks/accelerator.py":
        return
    for node in source.nodes:
        used = ast.unparse(node) if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.keyword) and node.arg in ("non_blocking", "pin_memory"):
            used = node.arg
        if used is not None and (
            used in ("torch.cuda", "torch.Event", "non_blocking", "pin_memory") or used.endswith(".is_cuda")
        ):
            yield source.breach(node.lineno, f"{source.room} uses {used}: use plait.ranks.accelerator")


def small(source: Source, house: House) -> Iterator[str]:
    count = len(source.text.splitlines())
    if count > MOST_LINES:
        yield source.breach(count, f"a file of {count} lines: cut it into modules of at most {MOST_LINES}")
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                yield source.breach(
                    node.lineno,
                    f"{node.name} has {lines} lines: cut it into functions of at most {MOST_FUNCTION_LINES}",
                )


def shallow(source: Source, house: House) -> Iterator[str]:
    """Of a class's bases that are ours, none has bases of ours."""
    for node in source.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for home, base in _our_bases(source, node, house):
            if any(_our_bases(home, base, house)):
                yield source.breach(
                    node.lineno,
                    f"{node.name} inherits through {base.name}, two levels: hold an object instead",
                )


def _our_bases(source: Source, node: ast.ClassDef, house: House) -> Iterator[tuple[Source, ast.ClassDef]]:
    """The bases of a class that the project defines, with their homes."""
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        name = ast.unparse(plain).rpartition(".")[2]
        for home in (source, *_homes_of(source, name, house)):
            for other in home.tree.body:
                if isinstance(other, ast.ClassDef) and other.name == name and other is not node:
                    yield home, other


def _homes_of(source: Source, name: str, house: House) -> Iterator[Source]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module in house:
            yield from (house[node.module] for alias in node.names if (alias.asname or alias.name) == name)


def no_state(source: Source, house: House) -> Iterator[str]:
    """No mutable values at module or class level, but tables in capitals that nobody changes."""
    frozen = {name for path, name in FROZEN_VALUES if path == source.path}
    for node in source.tree.body:
        for name, value in assigned(node):
            is_value = isinstance(value, ast.Call) and _called(value) not in IMMUTABLE_MAKERS
            if (is_value or _is_container(value)) and not _is_table(name) and name not in frozen:
                yield source.breach(
                    node.lineno, f"{name} is module state: pass it, or make it a table in capitals"
                )
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield source.breach(node.lineno, f"global {', '.join(node.names)}: return the value instead")
        elif isinstance(node, ast.ClassDef):
            for name, value in (pair for inner in node.body for pair in assigned(inner)):
                if _is_container(value) and not _is_table(name):
                    yield source.breach(
                        node.lineno, f"{node.name}.{name} is shared by all objects: set it in __init__"
                    )
        else:
            table = _changed_table(node)
            if table:
                yield source.breach(node.lineno, f"changes {table}: tables are constant, return a new value")


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    for target in targets:
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, value


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _is_container(value: ast.expr) -> bool:
    made = isinstance(value, ast.Call) and _called(value) in {"dict", "list", "set", "defaultdict", "deque"}
    literals = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return made or isinstance(value, literals)


def _is_table(name: str) -> bool:
    return name.isupper() or (name.startswith("__") and name.endswith("__"))


def _changed_table(node: ast.AST) -> str | None:
    """The name in capitals whose contents `node` changes."""
    held: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        held = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        held = node.func.value
    return held.id if isinstance(held, ast.Name) and held.id.isupper() else None


def private_names_are_listed(source: Source, house: House) -> Iterator[str]:
    for line, function, name in private_uses(source):
        if not {(source.path, function, name), (source.path, "*", name)} & PRIVATE_USES.keys():
            yield source.breach(
                line,
                f"{function} uses the private name {name}: find a public way, or say why in PRIVATE_USES",
            )


@cache
def private_uses(source: Source) -> list[tuple[int, str, str]]:
    """`(line, function, name)` of private names of others: attributes, imports, and modules named as text."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in PUBLIC_NAMES:
            if ast.unparse(node.value) not in {"self", "cls"}:
                yield node.lineno, function, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                standard = (origin + alias.name).split(".")[0] in sys.stdlib_module_names
                if not standard and any(map(_is_private, (origin + alias.name).split("."))):
                    yield node.lineno, function, origin + alias.name
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._[\w.]+", str(node.value)):
            yield node.lineno, function, str(node.value)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return list(visit(source.tree, ""))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def units_are_computed_once(source: Source, house: House) -> Iterator[str]:
    """No module but those listed reads how a plan shards and casts, or spells out several axes."""
    if source.path in READS_THE_PLAN:
        return
    for node in source.nodes:
        decided = isinstance(node, ast.Attribute) and node.attr in DECIDED_ONCE
        if decided and (node.attr in OF_PLANS_ALONE or ast.unparse(node.value).rpartition(".")[2] == "plan"):
            yield source.breach(node.lineno, f"reads a plan's {node.attr}: read the `UnitSpec` instead")
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else ()
        parts = node.keys if isinstance(node, ast.Dict) else parts
        named = [one.value for one in parts if isinstance(one, ast.Constant)]
        if len(named) > 1 and AXIS_NAMES.issuperset(named):
            yield source.breach(
                getattr(node, "lineno", 1),
                f"spells out the axes {named}: take them from the unit, or plait.plan.axes",
            )


def tidy(source: Source, house: House) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), start=1):
        if UNFINISHED.search(line):
            yield source.breach(number, "a note of unfinished work: finish it, or write an issue")
        if ABSOLUTE_PATH.search(line):
            yield source.breach(number, "an absolute path: take it from the environment or as an argument")


RULES: tuple[Rule, ...] = (
    imports_go_down,
    no_cycles,
    no_cycles_of_parts,
    torch_stays_in_its_rooms,
    devices_in_one_room,
    small,
    shallow,
    no_state,
    private_names_are_listed,
    units_are_computed_once,
    tidy,
)
