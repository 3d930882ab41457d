import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from plait.errors import CommunicationError, MeshError, PlaitError, PlanError, RankError
from plait.ranks.launch import rank_pool as rank_pool_module
from plait.ranks.launch.fork_server import stop_fork_server
from plait.ranks.launch.rank_main_loop import STACK_SIGNAL, STOP_SIGNAL
from plait.ranks.launch.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool():
    """A pool of this module's own: most of these tests end its ranks."""
    with RankPool(3, timeout=30.0, device="cpu") as pool:
        yield pool


def total():
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def wait_for_all():
    dist.all_reduce(torch.ones(4))


def gone(pids, patience=60.0):
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_results_of_a_pool_are_in_rank_order(pool):
    assert pool.run(total) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_a_pool_runs_on_fewer_and_on_more_ranks(rank_pool):
    assert rank_pool.run(total, ranks=1) == [(0, 1.0)]
    assert len(rank_pool.run(total, ranks=2)) == 2
    assert len(rank_pool.run(total, ranks=3)) == 3


def test_ranks_of_a_pool_keep_their_processes_between_runs(pool):
    assert pool.run(os.getpid) == pool.run(os.getpid)


def test_a_rank_of_a_pool_has_the_torch_state_of_its_caller(pool, monkeypatch, tmp_path):
    """What the caller has changed since the pool was started, too; and a rank collects garbage."""

    def leave_behind():
        os.environ["PLAIT_TEST_LEFT"] = "yes"
        torch.set_default_dtype(torch.float64)
        rank = dist.get_rank()
        sys.stdout, sys.stderr = (open(tmp_path / f"{name}-{rank}", "w") for name in ("out", "err"))  # noqa: SIM115
        print("said")
        print("warned", file=sys.stderr)

    pool.run(leave_behind)
    for rank in range(3):  # as soon as the function has returned, nothing waits to be written
        assert (tmp_path / f"out-{rank}").read_text() == "said\n"
        assert (tmp_path / f"err-{rank}").read_text() == "warned\n"
    monkeypatch.setenv("PLAIT_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_of_a_caller.py").write_text("def number():\n    return 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "a script", raising=False)
    number = importlib.import_module("module_of_a_caller").number

    def look():
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        numbers = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], number(), gc.isenabled()
        return os.environ["PLAIT_TEST"], os.environ.get("PLAIT_TEST_LEFT"), os.getcwd(), numbers

    assert pool.run(look) == [("yes", None, str(tmp_path), (1, "1", 7, True))] * 3
    assert pool.run(number) == [7] * 3

    def look_further():
        method = multiprocessing.get_start_method()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []) & {STOP_SIGNAL, signal.SIGTERM}
        handlers = [signal.getsignal(one) for one in (signal.SIGINT, STACK_SIGNAL)]
        ends = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signals = blocked, handlers, ends, multiprocessing.current_process().daemon
        return sys.modules["__main__"].__file__, torch.get_default_dtype(), method, sys.path[0], signals

    method = multiprocessing.get_all_start_methods()[0]
    # Ctrl-C reaches all processes, and SIGTERM may: the parent ends the ranks.
    signals = {STOP_SIGNAL}, [signal.SIG_IGN] * 2, False, False
    seen = "a script", torch.float32, method, str(tmp_path), signals
    assert pool.run(look_further) == [seen] * 3


def test_seeds_differ_between_ranks_and_repeat(pool):
    def draw():
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    first = pool.run(draw)
    assert first == pool.run(draw)
    assert all(len(set(column)) == 3 for column in zip(*first, strict=True))


def test_a_pool_runs_closures_and_functions_defined_without_a_file(pool):
    offset = 5
    names = {"__name__": "__main__"}
    exec("def twice(x):\n    return 2 * helper(x)\ndef helper(x):\n    return x + 1", names)
    assert pool.run(lambda x: x + offset, 1, ranks=2) == [6, 6]
    assert pool.run(names["twice"], 1, ranks=2) == [4, 4]


def test_one_error_ends_a_blocked_run_with_its_traceback(pool):
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("the culprit")
        wait_for_all()

    pids = pool.run(os.getpid)
    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: the culprit") as caught:
        pool.run(fail)
    assert caught.value.rank == 1
    assert "in fail" in caught.value.traceback
    assert caught.value.traceback.strip() in str(caught.value)
    assert gone(pids)
    assert len(pool.run(total)) == 3


def test_a_late_cause_comes_before_its_consequences(pool, monkeypatch):
    def fail():
        if dist.get_rank() == 2:
            dist.destroy_process_group()  # the others notice at once
            time.sleep(0.4)
            raise ValueError("the culprit")
        wait_for_all()

    monkeypatch.setattr(rank_pool_module, "_GRACE", 60.0)
    with pytest.raises(RankError, match=r"^rank 2 failed: ValueError: the culprit"):
        pool.run(fail)


def test_a_peer_that_left_early_is_named(pool, monkeypatch):
    def leave():
        if dist.get_rank() > 0:
            dist.recv(torch.ones(1), 0)

    monkeypatch.setattr(rank_pool_module, "_GRACE", 0.1)  # no other rank fails
    with pytest.raises(RankError, match=r"by peer(?s:.)*Finished before: rank 0"):
        pool.run(leave)


@pytest.mark.parametrize("kind", [PlanError, CommunicationError])
def test_plait_errors_of_a_rank_keep_their_type(pool, kind, monkeypatch):
    def fail():
        if dist.get_rank() == 2:
            raise kind("one sentence.")
        time.sleep(60)

    monkeypatch.setattr(rank_pool_module, "_GRACE", 0.1)  # no other rank fails
    with pytest.raises(kind, match=r"^one sentence\.$") as caught:
        pool.run(fail)
    assert isinstance(caught.value.__cause__, RankError)
    assert caught.value.__cause__.rank == 2


def test_a_killed_rank_of_a_pool_is_named_with_its_signal(pool):
    def die():
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_all()

    with pytest.raises(RankError, match=r"^rank 2 was killed by SIGKILL") as caught:
        pool.run(die)
    assert caught.value.rank == 2


def test_a_crash_of_a_rank_shows_its_stack(pool):
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankError, match=r"^rank 0 was killed by SIGSEGV") as caught:
        pool.run(crash, ranks=1)
    assert "in crash" in caught.value.traceback


@pytest.mark.parametrize(
    ("leave", "words"),
    [(lambda: os._exit(3), "ended with exit code 3"), (lambda: sys.exit(3), "failed: SystemExit: 3")],
)
def test_sys_exit_in_a_rank_is_a_failure(pool, leave, words):
    with pytest.raises(RankError, match=f"^rank 0 {words}"):
        pool.run(leave, ranks=1)


def test_arguments_and_results_that_cannot_be_pickled_are_named(pool):
    with pytest.raises(PlaitError, match=r"the function .*lambda.* cannot be sent to the ranks"):
        pool.run(lambda lock: None, threading.Lock())
    with pytest.raises(PlaitError, match="rank 0's result, of type generator, cannot be sent"):
        pool.run(lambda: (x for x in ()), ranks=1)

    class Trap(Exception):
        def __reduce__(self):
            return int, ("no number",)

    def trap(fail):
        if fail:
            raise Trap("sprung")
        return Trap()

    with pytest.raises(PlaitError, match="rank 0's result cannot be read here"):
        pool.run(trap, False, ranks=1)
    with pytest.raises(RankError, match=r"rank 0 failed: .*Trap: sprung"):
        pool.run(trap, True, ranks=1)


def states(pids):
    """Of each process one letter, as `ps` has them: S waits, T is stopped."""
    return "".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids)


@pytest.fixture
def timeout_once(monkeypatch):
    """Let a run's hour pass once a condition holds, which is given the number of ranks at work."""
    passed = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)

    def begin(condition):
        def wait(handles, timeout):
            ready = multiprocessing.connection.wait(handles, 0.005)
            passed[0] = 3600.0 * (not ready and condition(len(handles) // 2))
            return ready

        monkeypatch.setattr(rank_pool_module, "time", clock)
        monkeypatch.setattr(rank_pool_module, "wait", wait)

    return begin


def test_a_timeout_of_a_pool_shows_where_each_rank_is(pool, tmp_path, timeout_once):
    def loiter():
        rank = dist.get_rank()
        (tmp_path / str(rank)).touch()
        if rank == 1:
            dist.recv(torch.ones(1), 2)
        if rank == 2:
            time.sleep(600)

    pids = pool.run(os.getpid)
    begun = [tmp_path / "1", tmp_path / "2"]
    timeout_once(lambda left: left == 2 and all(map(Path.exists, begun)) and states(pids[1:]) == "SS")
    with pytest.raises(RankError, match=r"^not finished within 3600 s: rank 1, 2\.") as caught:
        pool.run(loiter, timeout=3600)
    assert caught.value.rank == 1
    assert "Finished before: rank 0" in str(caught.value)
    assert " in recv" in str(caught.value)
    assert " in loiter" in str(caught.value)
    assert gone(pids)


@pytest.mark.full
def test_a_stopped_rank_of_a_pool_is_ended_on_timeout(pool, monkeypatch, timeout_once):
    pids = pool.run(os.getpid, ranks=1)
    timeout_once(lambda left: states(pids) == "T")
    monkeypatch.setattr(rank_pool_module, "_GRACE", 0.1)  # it writes no stack
    with pytest.raises(RankError, match="rank 0: no answer: the process is stopped"):
        pool.run(lambda: os.kill(os.getpid(), signal.SIGSTOP), ranks=1, timeout=3600)
    assert gone(pids)


def test_the_end_of_a_pools_context_ends_its_ranks(pool):
    with RankPool(1, device="cpu") as own:
        pids = own.run(os.getpid)
        assert not gone(pids, patience=0.0)
    assert gone(pids)
    with pytest.raises(MeshError, match="0 ranks were asked for: give at least 1"):
        pool.run(os.getpid, ranks=0)


def test_a_run_leaves_no_files(pool, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool.run(total)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_may_have_children(pool):
    def children():
        data = torch.utils.data.TensorDataset(torch.arange(4.0))
        loader = torch.utils.data.DataLoader(data, num_workers=1)
        return sum(batch.item() for (batch,) in loader)

    def ended():
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        child = context.Process(target=lambda: (begun.set(), time.sleep(60)))
        child.start()
        assert begun.wait(60)
        child.terminate()  # a rank itself does not end by this signal
        child.join(60)
        return child.exitcode

    assert pool.run(children, ranks=1) == [6.0]
    assert pool.run(ended, ranks=1) == [-signal.SIGTERM]


OF_MAIN = """
import os, torch
from typing import NamedTuple
from plait.ranks.launch.rank_pool import RankPool
from torch.utils.data import DataLoader, Dataset, Sampler

class Item(NamedTuple):
    value: torch.Tensor

class Batches:
    class Batch:
        def __init__(self, values): self.values = values

class Refused(Exception): pass

class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 4: raise Refused("four")
        return Item(torch.tensor(float(index)))

def collate(items): return Batches.Batch(torch.stack([item.value for item in items]))

def begin(worker): os.environ["BEGUN"] = "yes"

class Backwards(Sampler):
    def __init__(self, *numbers): self.numbers = numbers
    def __iter__(self): return iter(self.numbers)

def run():
    loader = DataLoader(Numbers(), 2, sampler=Backwards(3, 2, 1, 0), num_workers=1, collate_fn=collate,
                        worker_init_fn=begin, persistent_workers=True)
    seen = [batch.values.tolist() for _ in range(2) for batch in loader]
    try:
        list(DataLoader(Numbers(), sampler=Backwards(4), num_workers=1))
    except Refused:
        seen.append("refused")
    return seen, torch.utils.data.default_collate([Item(torch.ones(1))])

pool = RankPool(1, device="cpu")  # not closed: that is for the end of the process
((seen, batch),) = pool.run(run)
assert type(batch) is Item
print(seen)
"""


@pytest.mark.full
def test_a_data_loader_has_the_classes_of_the_script(tmp_path):
    """Dataset, sampler, functions, batches and errors go to workers and come back; no process is left."""
    command = [sys.executable, "-"]  # no file that a worker could import
    marked = os.environ | {"PLAIT_TEST": str(tmp_path)}
    done = subprocess.run(command, input=OF_MAIN, capture_output=True, text=True, timeout=60, env=marked)
    assert done.stdout == "[[3.0, 2.0], [1.0, 0.0], [3.0, 2.0], [1.0, 0.0], 'refused']\n", done.stderr
    assert not [entry for entry in Path("/proc").glob("[0-9]*") if marked_with(tmp_path, entry)]


def marked_with(folder, entry):
    try:
        return f"PLAIT_TEST={folder}".encode() in (entry / "environ").read_bytes()
    except OSError:
        return False


def test_the_fork_server_stays_while_a_process_of_the_program_runs(pool):
    """multiprocessing learns from the server that the process has ended."""
    pool.run(os.getpid, ranks=1)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    own = multiprocessing.get_context("forkserver").Process(target=signal.pause)
    own.start()
    stop_fork_server()
    own.kill()
    own.join()
    assert own.exitcode == -signal.SIGKILL
    assert multiprocessing.forkserver._forkserver._forkserver_pid == server


CELL = """
from torch.utils.data import DataLoader, Dataset
class Number(Dataset):
    def __len__(self): return 1
    def __getitem__(self, index): return {}
def first(): return next(iter(DataLoader(Number(), None, num_workers=1)))
"""


def test_a_cell_of_a_notebook_may_define_a_class_anew(pool, monkeypatch):
    """Its main module has no file that a worker could import."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for value in (1, 2):
        exec(CELL.format(value), vars(main))
        assert pool.run(main.first, ranks=1) == [value]
        assert pool.run(lambda one: pickle.loads(pickle.dumps(one))[0], main.Number(), ranks=1) == [value]


@pytest.mark.full
def test_child_processes_of_a_rank_end_with_it(pool):
    """Also where it came from a fork server of its own, and so would never learn of it."""

    def start(method):
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        return child.pid

    pids = [pid for method in ("fork", "forkserver") for pid in pool.run(start, method, ranks=1)]
    pool.close()
    assert gone(pids)


SCRIPT = """
import os, time, torch, torch.distributed as dist
from plait.ranks.launch.rank_pool import RankPool

def block():
    os.write(1, b"%d\\n" % os.getpid())  # one write: two ranks share the pipe
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 1)
    time.sleep(60)

RankPool(2, device="cpu").run(block)  # without a guard for __main__
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGINT, signal.SIGTERM)),
        signal.SIGKILL,
    ],
)
def test_a_signal_to_the_parent_ends_all_ranks(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.send_signal(number)
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == -number
    assert gone(pids)
    assert errors.count("Traceback") == (number == signal.SIGINT)  # the parent's own
    told = [f"rank {rank}: the process that started it is gone, so it ends." for rank in range(2)]
    assert number != signal.SIGKILL or sorted(errors.splitlines()) == told
    assert not list(tmp_path.glob("plait-*"))
