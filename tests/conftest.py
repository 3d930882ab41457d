"""What all tests share: ranks, as threads or as one pool of processes; how examples are drawn.

torch, plait and hypothesis are imported late: the process that only starts the workers does without.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest

if TYPE_CHECKING:
    from plait.ranks.launch.rank_pool import RankPool

ON_ONE_WORKER = ("transformers", "gpu")
"""Marks whose tests share an import of seconds, or devices."""
RANKS = {"rank_pool", "thread_ranks"}
MOST_YOUNG = 3
"""Collections of 50,000 new objects after which those that are left are taken for what stays."""
STARTED, MOST_SECONDS = monotonic(), 170
"""When this worker began, and for how long tests of a twentieth are begun."""


def pytest_configure(config: pytest.Config) -> None:
    if "not gpu" in config.option.markexpr:  # a mesh of one rank takes a GPU that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the workers run the tests
    gc.disable()  # until all tests are collected: what is imported stays
    import hypothesis
    import torch

    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell has put this process in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    # Without the full products, examples are few and the same each time: what fails was broken by a change,
    # not drawn by bad luck. `make test-all` explores. No deadline: times are noisy, and no test asserts one.
    fixed = "not full" in config.option.markexpr
    profile = {"derandomize": True, "max_examples": 12} if fixed else {"max_examples": 100}
    hypothesis.settings.register_profile("plait", deadline=None, **profile)
    hypothesis.settings.load_profile("plait")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--twentieth", metavar="SEED", help="of the tests chosen run a twentieth, by this seed")
    parser.addoption(
        "--completion", metavar="early|late|SEED", help="run ranks as threads under NCCL's rules"
    )
    parser.addoption(
        "--gpu-tests-on",
        metavar="cuda[:RANKS]|cpu[:RANKS]",
        default="cuda",
        help="run tests marked gpu on GPUs, each shared by at most RANKS, or on at most RANKS CPU ranks",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files: their tests share references, results of meta runs and a pool of ranks.

    Files that import transformers are on one worker, and so are those that take GPUs.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def scope_of(file: str) -> str:
        text = (config.rootpath / file).read_text()
        return next((mark for mark in ON_ONE_WORKER if f"pytest.mark.{mark}" in text), file)

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.partition("::")[0])

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Skip what needs a missing transformers; mark what only the full run has; choose a twentieth."""
    is_missing = find_spec("transformers") is None
    for item in items:
        if item.get_closest_marker("transformers"):
            item.add_marker(pytest.mark.skipif(is_missing, reason="transformers is not installed"))
    for item in _beyond_quick(items):
        item.add_marker(pytest.mark.full)
    yield  # -m leaves tests out
    seed = config.getoption("--twentieth")
    if seed is not None:
        items[:] = [item for item in items if crc32(f"{seed} {item.nodeid}".encode()) % 20 == 0]


def _beyond_quick(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield cases of tests with ranks that only the full run has.

    The quick run has the last of several cases, in which most factors are at work; with `quick_cases`
    so many, evenly spread from the first on.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if RANKS & {*getattr(item, "fixturenames", ())} and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for own in cases.values():
        mark, last = own[0].get_closest_marker("quick_cases"), len(own) - 1
        if mark is None:
            quick = {last}
        else:
            quick = {round(last * turn / max(mark.args[0] - 1, 1)) for turn in range(mark.args[0])}
        yield from (item for number, item in enumerate(own) if number not in quick)


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, and collect less often: a sixth of the time.

    Tests that need a collection call `gc.collect`.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Then leave out what tests have imported and keep: `reshard`, for one, collects on each rank."""
    if gc.get_count()[1] >= MOST_YOUNG:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _within_the_time_for_a_twentieth(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--twentieth") is not None and monotonic() - STARTED > MOST_SECONDS:
        pytest.skip(f"the twentieth has taken {MOST_SECONDS} s")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Local CPU ranks: `rank_pool.run(function, *arguments, ranks=4)`; they start when asked for."""
    from plait.ranks.launch.rank_pool import RankPool

    with RankPool(8, threads=1, timeout=60.0, device="cpu") as pool:
        yield pool


class ThreadRanks:
    """Ranks as threads of the test's own process, asked as a `RankPool` is.

    What meta runs have shown of layers is kept from one test to the next: many tests build the same model.
    """

    def __init__(self, completion: Any = None, make_rules: Any = None) -> None:
        """`completion`: run under NCCL's rules, with operations that complete early, late, or by a seed.

        `make_rules`: makes the rules of a run, by default `StreamRules` with this completion.
        """
        self.completion, self.make_rules = completion, make_rules
        self._shared_results: dict[Hashable, Any] = {}

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
        """Return what `function(*arguments)` returns on each rank; one thread of torch each."""
        from parity.ruled_threads import run_ruled_threads
        from parity.stream_rules import StreamRules
        from plait.engine.blueprint import Blueprint
        from plait.ranks.launch.rank_threads import run_threads

        self._shared_results.pop(Blueprint, None)  # it may come from code that a test has broken
        function = _on_own_core(function)
        if self.make_rules is None and self.completion is None:
            return run_threads(function, arguments, ranks, 1, self._shared_results)
        rules = StreamRules(self.completion) if self.make_rules is None else self.make_rules()
        return run_ruled_threads(function, arguments, ranks, 1, rules, self._shared_results)

    def under_rules(self, completion: Any, make_rules: Any = None) -> ThreadRanks:
        """Return such ranks under NCCL's rules, with the same results of meta runs."""
        ruled = ThreadRanks(completion, make_rules)
        ruled._shared_results = self._shared_results
        return ruled


def _on_own_core(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let rank threads, of which one runs at a time, share a core of their worker: a quarter less time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker or not hasattr(os, "sched_setaffinity"):
        return function
    cores = sorted(os.sched_getaffinity(0))

    def pinned(*arguments: Any) -> Any:
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})  # of this thread alone
        return function(*arguments)

    return pinned


@pytest.fixture(scope="session")
def thread_ranks(request: pytest.FixtureRequest) -> ThreadRanks:
    """Ranks without processes, for what does not depend on how bytes travel: quick, on either worker."""
    given = request.config.getoption("--completion")
    return ThreadRanks(int(given) if given and given.isdigit() else given)
