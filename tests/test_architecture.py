"""The house keeps its rules (see house_rules.py), and each rule tells of the text that breaks it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import plait
from house_rules import (
    FROZEN_VALUES,
    PRIVATE_USES,
    ROOT,
    RULES,
    House,
    Rule,
    Source,
    assigned,
    house,
    imports_go_down,
    no_cycles,
    no_cycles_of_parts,
    no_state,
    private_names_are_listed,
    private_uses,
    shallow,
    small,
    tidy,
    torch_stays_in_its_rooms,
    units_are_computed_once,
)

MOST_PUBLIC_NAMES = 34
PUBLIC = [
    "CorruptionChecks",
    "Costs",
    "Dropout",
    "Hardware",
    "Loader",
    "Mesh",
    "MixtureOfExperts",
    "Muon",
    "Owned",
    "PlaitError",
    "Plan",
    "Snapshots",
    "Stream",
    "attention",
    "check",
    "cross_entropy",
    "dpo_loss",
    "fit",
    "launch",
    "load",
    "lora",
    "memory",
    "models",
    "parallelize",
    "plans",
    "positions",
    "predict",
    "reshard",
    "reshard_kept",
    "save",
    "schedule",
    "sequence_part",
    "simulate",
    "verify",
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_of_the_package_keeps_the_rule(rule: Rule) -> None:
    breaches = [breach for source in house().values() for breach in rule(source, house())]
    assert not breaches, "\n" + "\n".join(breaches)


def test_every_listed_exception_to_a_rule_still_occurs_in_the_source() -> None:
    uses = {
        (source.path, place, name)
        for source in house().values()
        for _, function, name in private_uses(source)
        for place in (function, "*")
    }
    assert set(PRIVATE_USES) <= uses, "take what is no longer used out of PRIVATE_USES"
    names = {
        (source.path, name)
        for source in house().values()
        for node in source.tree.body
        for name, _ in assigned(node)
    }
    assert set(FROZEN_VALUES) <= names, "take what is no longer there out of FROZEN_VALUES"


def test_examples_benchmarks_and_tests_keep_the_rules_for_text() -> None:
    files = [file for folder in ("examples", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
    texts = [
        Source("", f"../../{file.relative_to(ROOT)}", file.read_text())
        for file in files
        if file != Path(__file__)
    ]
    breaches = [breach for text in texts for breach in tidy(text, house())]
    assert not breaches, "\n" + "\n".join(breaches)


BROKEN: tuple[tuple[Rule, str, str, str], ...] = (
    (imports_go_down, "ranks/x.py", "from plait.engine.pipeline.stage import Stage", "ranks imports engine"),
    (
        imports_go_down,
        "checkpoint/x.py",
        "from plait.engine.sharding.unit import Unit",
        "checkpoint imports engine",
    ),
    (
        imports_go_down,
        "schedules/x.py",
        "def f():\n    import plait.pictures.quantities",
        ":2: schedules imports pictures",
    ),
    (
        imports_go_down,
        "plan/plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from plait.ranks import Mesh",
        ":3: plan imports ranks",
    ),
    (imports_go_down, "ranks/x.py", "from plait import models", "ranks imports models"),
    (imports_go_down, "ranks/x.py", "from ..models import gpt2", "ranks imports models"),
    (imports_go_down, "ranks/__init__.py", "from ..models import gpt2", "ranks imports models"),
    (imports_go_down, "app/x.py", "import plait", "imports the package itself"),
    (imports_go_down, "app/x.py", "from plait import cross_entropy", "imports the package itself"),
    (imports_go_down, "attic/x.py", "", "room 'attic' stands in no floor"),
    (no_cycles, "ranks/group.py", "from plait.ranks.mesh import Mesh", "plait.ranks.mesh leads back here"),
    (no_cycles, "ranks/group.py", "from plait.ranks.group import Group", "plait.ranks.group leads back here"),
    (
        no_cycles_of_parts,
        "tensor/autograd/x.py",
        "from plait.tensor.attention.attention import attention",
        "tensor.autograd and tensor.attention import each other",
    ),
    (torch_stays_in_its_rooms, "engine/x.py", "import torch.distributed as dist", "use plait.ranks"),
    (torch_stays_in_its_rooms, "engine/x.py", "from torch import distributed", "use plait.ranks"),
    (
        torch_stays_in_its_rooms,
        "engine/x.py",
        "from torch.distributed.tensor import DTensor",
        "use plait.ranks",
    ),
    (torch_stays_in_its_rooms, "engine/x.py", "import torch\ntorch.distributed.get_rank()", "engine uses"),
    (torch_stays_in_its_rooms, "schedules/x.py", "from torch import Tensor", "schedules imports torch"),
    (torch_stays_in_its_rooms, "plan/x.py", "def f():\n    import torch", ":2: plan imports torch"),
    (small, "ranks/x.py", "x = 1\n" * 601, "a file of 601 lines"),
    (small, "ranks/x.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    (
        shallow,
        "ranks/x.py",
        "class A(dict): ...\nclass B(A): ...\nclass C(B): ...",
        ":3: C inherits through B",
    ),
    (shallow, "ranks/x.py", "class A: ...\nclass B(A[int]): ...\nclass C(B): ...", "C inherits through B"),
    (
        shallow,
        "ranks/x.py",
        "from plait.errors import PlanError\nclass WorseError(PlanError): ...",
        ":2: WorseError inherits through PlanError",
    ),
    (no_state, "ranks/x.py", "cache = {}", "cache is module state"),
    (no_state, "ranks/x.py", "_seen: set[int] = set()", "_seen is module state"),
    (no_state, "ranks/x.py", "traffic = Traffic()", "traffic is module state"),
    (no_state, "ranks/x.py", "N = 0\ndef f():\n    global N\n    N = 1", ":3: global N"),
    (no_state, "ranks/x.py", "class A:\n    held = []", "A.held is shared"),
    (no_state, "ranks/x.py", "class A:\n    held: dict[int, int] = {}", "A.held is shared"),
    (no_state, "ranks/x.py", "TABLE = {}\ndef f():\n    TABLE[1] = 2", ":3: changes TABLE"),
    (no_state, "ranks/x.py", "TABLE = []\ndef f():\n    TABLE.append(2)", ":3: changes TABLE"),
    (
        private_names_are_listed,
        "ranks/x.py",
        "def f(t):\n    return t._version",
        ":2: f uses the private name _version",
    ),
    (private_names_are_listed, "ranks/x.py", "from torch._utils import f", "private name torch._utils.f"),
    (private_names_are_listed, "ranks/x.py", "import torch._dynamo", "private name torch._dynamo"),
    (private_names_are_listed, "ranks/x.py", "load('torch._dynamo')", "private name torch._dynamo"),
    (units_are_computed_once, "engine/x.py", "x = runner.plan.shards", "reads a plan's shards"),
    (units_are_computed_once, "engine/x.py", "x = other.strategy == 'full'", "reads a plan's strategy"),
    (units_are_computed_once, "engine/x.py", "x = plan.master_precision", "reads a plan's master_precision"),
    (units_are_computed_once, "engine/x.py", "x = ('shard', 'cp')", "spells out the axes"),
    (units_are_computed_once, "engine/x.py", "x = {'shard': 2, 'cp': 1}", "spells out the axes"),
    (tidy, "ranks/x.py", "x = 1  # TO" + "DO: more", "unfinished work"),
    (tidy, "ranks/x.py", "x = '/" + "home/me/data'", "an absolute path"),
)


@pytest.mark.parametrize(
    ("rule", "path", "text", "told"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_each_rule_reports_a_breach_with_its_line(rule: Rule, path: str, text: str, told: str) -> None:
    name = ".".join(["plait", *Path(path).with_suffix("").parts]).removesuffix(".__init__")
    source = Source(name, path, text)
    breaches = list(rule(source, House({**house(), name: source})))
    assert len(breaches) == 1, breaches
    assert breaches[0].startswith(f"src/plait/{path}:")
    assert told in breaches[0]


@pytest.mark.parametrize(
    "text",
    [
        "T = TypeVar('T')\nTABLE = {1: 2}\n__all__ = ['T']\nKind = Literal['a']\nx = 1\n_TABLE = dict(a=1)",
        "class A(nn.Module): ...\nclass B(A): ...\nclass C:\n    x: list[int] = field(default_factory=list)",
        "def f(self):\n    self._x = self._y()\n    os._exit(1)\n    return self.__class__.__name__",
        "def f():\n    table = {}\n    table[1] = 2\n    table.update(a=1)\n    return table",
        "def f():\n" + "    x = 1\n" * 59,
        "from plait.ranks.group import Group\nfrom plait.errors import MeshError\nimport torch.distributed",
        "path = '~/data' + 'a/tmp/b'",
    ],
)
def test_no_rule_reports_allowed_code(text: str) -> None:
    source = Source("plait.ranks.x", "ranks/x.py", text)
    assert [
        breach for rule in RULES for breach in rule(source, House({**house(), source.name: source}))
    ] == []


def test_plait_exports_exactly_the_listed_public_names() -> None:
    assert plait.__all__ == PUBLIC, "a public name came or went: change PUBLIC here and the documentation"
    assert len(PUBLIC) <= MOST_PUBLIC_NAMES
    assert dir(plait) == PUBLIC
    assert all(getattr(plait, name) is not None for name in PUBLIC)


def test_import_does_not_load_torch() -> None:
    code = "import sys, plait; plait.schedule; plait.check; plait.Plan; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False", "plait, schedules and plan must not import torch"


DEFINED_AGAIN = {"Attention", "Embedding", "Head", "MLP", "SparseMLP"}
"""One meaning each: that layer, of one family of models."""


def test_a_type_name_is_defined_once() -> None:
    homes: dict[str, set[str]] = {}
    for source in house().values():
        for node in source.nodes:
            alias = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"
            if isinstance(node, ast.ClassDef) or alias:
                name = node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target)  # type: ignore[attr-defined]
                homes.setdefault(name, set()).add(source.path)
    again = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert set(again) == DEFINED_AGAIN, again


def test_files_of_unit_tests_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (Path(__file__).parent / "unit").rglob("test_*.py"))
    assert max(names.values()) == 1, f"pytest collects one of each name only: {names.most_common(1)}"
