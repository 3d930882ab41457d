"""The room of devices: what the CPU does, and what a GPU would be asked (with a stand-in for torch.cuda)."""

from __future__ import annotations

import re
import subprocess
from threading import current_thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.engine.parallelize import warn_of_another_device
from plait.errors import MeshError
from plait.ranks import accelerator
from plait.ranks.accelerator import CPU, StreamEvent, accelerator_of_rank
from plait.ranks.launch import world_membership as worlds
from plait.ranks.launcher_environment import World
from plait.ranks.mesh import GridMesh, Mesh
from plait.ranks.rank_device import device_change

CUDA = torch.device("cuda", 0)
META = torch.device("meta")


def test_device_operations_on_a_cpu_are_synchronous() -> None:
    tensor = torch.arange(3.0)
    accelerator.copy_later(target := torch.zeros(3), tensor)
    assert torch.equal(target, tensor)
    assert accelerator.moved_later(tensor, CPU) is tensor
    assert accelerator.moved_later(tensor, CPU, copy=True) is not tensor
    for wait in (accelerator.synchronize, accelerator.synchronize_stream, accelerator.make_current):
        wait(CPU)
    StreamEvent(CPU).wait()
    assert not accelerator.host_zeros(4, torch.float64, beside=CPU).is_pinned()
    assert not accelerator.is_accelerator(CPU)
    assert not accelerator.is_accelerator(tensor)


@pytest.mark.parametrize(
    ("where", "dtype", "capability", "multiplies"),
    [
        (CUDA, torch.bfloat16, (9, 0), True),
        (CUDA, torch.float16, (8, 0), True),
        (CUDA, torch.bfloat16, (7, 5), False),
        (CUDA, torch.float32, (9, 0), False),
        (CPU, torch.bfloat16, (9, 0), False),
    ],
)
def test_which_devices_add_narrow_products_to_wide_sums(
    monkeypatch: pytest.MonkeyPatch,
    where: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int],
    multiplies: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    assert accelerator.multiplies_into_float32(where, dtype) is multiplies
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
        assert not accelerator.multiplies_into_float32(where, dtype)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not accelerator.multiplies_into_float32(where, dtype)


@pytest.mark.parametrize(
    ("where", "dtype", "capability", "multiplies"),
    [
        (CPU, torch.float32, (0, 0), True),
        (CPU, torch.float64, (0, 0), False),
        (CUDA, torch.bfloat16, (9, 0), True),
        (CUDA, torch.bfloat16, (10, 3), True),
        (CUDA, torch.bfloat16, (8, 0), False),
        (CUDA, torch.bfloat16, (12, 0), False),
        (CUDA, torch.float32, (9, 0), False),
        (META, torch.float32, (9, 0), True),
        (META, torch.float64, (9, 0), False),
    ],
)
def test_groups_are_multiplied_at_once_on_cpus_and_meta_and_by_one_kernel_of_newer_gpus(
    monkeypatch: pytest.MonkeyPatch,
    where: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int],
    multiplies: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert accelerator.multiplies_groups(where, dtype) is multiplies
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator.multiplies_groups(where, dtype) is (multiplies and where != CUDA)


def test_a_graph_is_captured_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert accelerator.captures_graph(CUDA)
    assert not accelerator.captures_graph(CPU)


@pytest.mark.parametrize(("visible", "local", "index"), [(8, 3, 3), (4, 0, 0), (1, 0, 0), (1, 3, 0)])
def test_a_rank_has_the_gpu_of_its_number_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, visible: int, local: int, index: int
) -> None:
    monkeypatch.setattr(accelerator, "visible_accelerators", lambda: visible)
    assert accelerator_of_rank(local) == torch.device("cuda", index)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "visible_accelerators", lambda: 2)
    for local in (2, 3):
        with pytest.raises(MeshError, match=f"local rank {local} sees 2 GPUs: start as many"):
            accelerator_of_rank(local)


ONE, FOUR = {"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("launcher", "visible", "asked", "environment", "chosen"),
    [
        ("slurm", 1, "auto", ONE, 0),  # --gpus-per-task=1 shows each task one
        ("slurm", 1, "cuda", ONE, 0),
        ("torchrun", 4, "auto", FOUR, 3),
        ("torchrun", 4, "auto", {}, 3),
        ("slurm", 1, "auto", {}, None),  # four tasks that see the same one
        ("plait", 1, "auto", ONE, None),
        ("torchrun", 2, "auto", {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ("torchrun", 4, "cpu", FOUR, None),
        ("torchrun", 0, "auto", {"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_the_device_of_a_rank_by_launcher(
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    visible: int,
    asked: str,
    environment: dict[str, str],
    chosen: int | None,
) -> None:
    monkeypatch.setattr(worlds, "visible_accelerators", lambda: visible)
    monkeypatch.setattr(accelerator, "visible_accelerators", lambda: visible)
    world = World(3, 4, 3, 4, launcher, "env://")
    expected = None if chosen is None else torch.device("cuda", chosen)
    assert worlds._accelerator(world, asked, environment) == expected


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: torch says that there is a GPU, number 2 of which is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda chosen: None)


@pytest.mark.usefixtures("one_gpu")
def test_a_process_outside_a_launcher_takes_torchs_current_gpu() -> None:
    assert Mesh().device == torch.device("cuda", 2)
    assert Mesh(alone=True).device == torch.device("cuda", 2)
    assert GridMesh(rows=1, device="cpu").device == CPU


@pytest.mark.usefixtures("one_gpu")
def test_ranks_without_nccl_stay_on_the_cpu(thread_ranks: Any) -> None:
    assert thread_ranks.run(lambda: Mesh().device.type, ranks=1) == ["cpu"]
    assert thread_ranks.run(lambda: Mesh(dp=2).device.type, ranks=2) == ["cpu"] * 2


@pytest.mark.parametrize(
    ("tensors", "chosen", "by_default", "told"),
    [
        (
            ["cuda:0"],
            "cpu",
            True,
            "are on cuda, and the mesh's device is cpu, .*: give the mesh device='cuda'",
        ),
        (["cuda:0", "cpu"], "cpu", False, "are on cuda, and"),
        (["cpu", "meta"], "cuda:0", True, "are on cpu, and the mesh's device is cuda:0"),
        (["cpu"], "cuda:0", False, "^$"),
        (["cpu", "meta"], "cpu", True, "^$"),
        (["cuda:1", "meta"], "cuda:0", True, "^$"),
        ([], "cuda:0", True, "^$"),
    ],
)
def test_a_model_moved_to_another_device_is_warned_of(
    tensors: list[str], chosen: str, by_default: bool, told: str
) -> None:
    found = device_change(map(torch.device, tensors), torch.device(chosen), by_default=by_default)
    assert re.search(told, found)


@pytest.mark.usefixtures("one_gpu")
def test_parallelize_warns_of_a_model_elsewhere() -> None:
    model, mesh = nn.Sequential(nn.Linear(2, 2)), Mesh()
    with pytest.warns(UserWarning, match="tensors are on cpu, and the mesh's device is cuda:2"):
        warn_of_another_device(model.parameters(), mesh)


@pytest.mark.parametrize("launcher", ["torchrun", "openmpi"])
def test_a_process_that_has_not_joined_the_ranks_of_its_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    names = {"torchrun": ("RANK", "WORLD_SIZE"), "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
    for name, value in zip(
        (*names[launcher], "MASTER_ADDR", "MASTER_PORT"), ("1", "2", "a", "7"), strict=True
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshError, match=f"{launcher} started this process as rank 1 of 2, and it has not"):
        Mesh()
    assert Mesh(alone=True).world == 1


@pytest.mark.parametrize("visible", [0, 1, 2])
def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, visible: int) -> None:
    monkeypatch.setattr(worlds, "visible_accelerators", lambda: visible)
    with pytest.raises(MeshError, match=f"4 ranks on this host see {visible} usable GPUs"):
        worlds._accelerator(World(3, 4, 3, 4, "torchrun", "env://"), "cuda", {})


@pytest.mark.parametrize(
    ("printed", "cuda", "nccl", "told"),
    [
        ("550.54.15\n550.54.15\n", "12.6", (2, 21, 5), ["driver 550.54.15", "CUDA 12.6", "NCCL 2.21.5"]),
        ("", "12.6", None, ["CUDA 12.6"]),
        (FileNotFoundError("nvidia-smi"), None, None, []),
        (subprocess.TimeoutExpired("nvidia-smi", 30), None, (2, 27), ["NCCL 2.27"]),
    ],
)
def test_accelerator_versions_list_only_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, printed: Any, cuda: str | None, nccl: Any, told: list[str]
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert (command[0], options) == (
            "nvidia-smi",
            {"check": True, "capture_output": True, "text": True, "timeout": 30},
        )
        if isinstance(printed, Exception):
            raise printed
        return subprocess.CompletedProcess([], 0, printed)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl is not None)
    monkeypatch.setattr(accelerator, "nccl_version", lambda: nccl)
    assert [f"{name} {version}" for name, version in accelerator.accelerator_versions().items()] == told


def test_a_mesh_makes_its_device_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else events and streams of helpers would belong to another."""
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    assert GridMesh(rows=1, device="cuda:2").device == torch.device("cuda", 2)
    GridMesh(rows=1, device="cpu")
    assert made == [torch.device("cuda", 2)]


@pytest.mark.parametrize(("capability", "kept"), [((9, 0), 33 * 2**20), ((8, 0), 8 * 2**20 + 2**17 + 2**20)])
def test_workspaces_of_cublas_do_not_count_as_tensor_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kept: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda where: kept + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda where: 7)
    assert accelerator.peak_allocated(CUDA) == 5
    assert (accelerator.allocated(CUDA), accelerator.allocated(CPU)) == (0, 0)


def test_torchs_fake_accelerator_is_made_in_a_lasting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 for CUDA and no GPU; FakeTensorMode, which makes it, is entered nowhere before."""
    entered: list[str] = []
    monkeypatch.setattr(FakeTensorMode, "__enter__", lambda _: entered.append(current_thread().name))
    monkeypatch.setattr(FakeTensorMode, "__exit__", lambda *_: None)
    monkeypatch.setattr(accelerator, "STAND_IN_THREAD", "stays")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, cuda in (("2.12.0", "13.0"), ("2.11.0", None), ("2.11.0+cu130", "13.0")):
        assert entered == []
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        accelerator.keep_stand_in_for_gpus()
        accelerator.keep_stand_in_for_gpus()
    assert entered == ["stays"]
    assert "stays" in [thread.name for thread in enumerate_threads()]


def test_the_version_of_nccl_is_that_of_the_library_or_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert accelerator.nccl_version("no-such-library.so") == (2, 29, 7)

    def ask(found: Any) -> None:
        found._obj.value = 23_007

    monkeypatch.setattr(accelerator.ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=ask))
    assert accelerator.nccl_version() == (2, 30, 7)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert accelerator.nccl_version() == ()


@pytest.mark.parametrize(
    ("where", "capability", "multiplies"),
    [
        (CPU, (0, 0), True),
        (META, (0, 0), True),
        (CUDA, (8, 9), True),
        (CUDA, (9, 0), True),
        (CUDA, (8, 6), False),
    ],
)
def test_float8_matrices_are_multiplied_on_cpus_and_newer_gpus(
    monkeypatch: pytest.MonkeyPatch, where: torch.device, capability: tuple[int, int], multiplies: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert accelerator.multiplies_float8(where) is multiplies
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator.multiplies_float8(where) is (multiplies and where != CUDA)
