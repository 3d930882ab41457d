"""The GPU of a rank: copies to and from it, streams, events, graphs; the only module that calls `torch.cuda`.

An *accelerator* is a device that computes by itself (CUDA): calls return before their work is done, streams
and events order it, and copies from pinned memory overlap with it. The CPU is none: its calls return when
their work is done, so that waits return at once.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import MeshError

CPU = torch.device("cpu")
STAND_IN_THREAD = "plait-stand-in-for-gpus"


def is_accelerator(where: torch.device | Tensor) -> bool:
    """Return whether a device, or a tensor's device, is a GPU, which computes while the host continues."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type == "cuda"


def captures_graph(device: torch.device) -> bool:
    """Return whether this thread's current stream of a GPU records its work into a CUDA graph."""
    return is_accelerator(device) and torch.cuda.is_current_stream_capturing()


def multiplies_into_float32(where: torch.device | Tensor, dtype: torch.dtype) -> bool:
    """Return whether a device adds a product of `dtype` matrices to a float32 matrix in one `addmm`.

    That is `torch.addmm` with `out_dtype`: for 16-bit matrices, on CUDA of compute capability 8.0 or higher,
    unless torch tunes its products (`PYTORCH_TUNABLEOP_ENABLED`).
    """
    device = where.device if isinstance(where, Tensor) else where
    # Not `is_accelerator`: asked for each product.
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.version.hip is not None or torch.cuda.tunable.is_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def multiplies_groups(where: torch.device | Tensor, dtype: torch.dtype) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` takes `dtype` without a wait of the host for sizes.

    On a CPU, and on meta, that is any of 32 or 16 bits. On a GPU bf16, by a kernel for CUDA of compute
    capability 9 or 10; elsewhere torch loops over the groups, for which the host waits for their sizes.
    """
    device = where.device if isinstance(where, Tensor) else where
    if device.type in ("cpu", "meta"):
        return dtype in (torch.float32, torch.bfloat16, torch.float16)
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def multiplies_float8(device: torch.device) -> bool:
    """Return whether `torch.nn.functional.scaled_mm` multiplies e4m3 and e5m2 matrices on `device`.

    On a CPU, on meta, and on CUDA of compute capability 8.9 or higher.
    """
    if device.type in ("cpu", "meta"):
        return True
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def multiplies_float8_groups(where: torch.device | Tensor, dtype: torch.dtype) -> bool:
    """Return whether `torch.nn.functional.scaled_grouped_mm` multiplies e4m3 rows, with results in `dtype`.

    On CUDA of compute capability 9, in bf16 alone.
    """
    device = where.device if isinstance(where, Tensor) else where
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def computation_settings() -> dict[str, object]:
    """Return torch's settings that change numerical results (TF32, deterministic kernels …), by name."""
    backends, kernels = torch.backends, torch.backends.cuda
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.fp32_precision": getattr(backends, "fp32_precision", None),  # has no type
        "torch.backends.cudnn.fp32_precision": backends.cudnn.fp32_precision,
        # "ieee" is what "none" means there; `torch.set_float32_matmul_precision` sets both.
        "fp32_precision of matmul in torch.backends.cuda, mkldnn": [
            one.matmul.fp32_precision.replace("none", "ieee") for one in (kernels, backends.mkldnn)
        ],
        "torch.backends.cudnn, enabled, benchmark, deterministic": [
            *(backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic)
        ],
        "torch.backends.mkldnn.enabled": backends.mkldnn.enabled,
        "torch.backends.cuda.matmul, reduced precision in fp16, bf16": [
            kernels.matmul.allow_fp16_reduced_precision_reduction,
            kernels.matmul.allow_bf16_reduced_precision_reduction,
        ],
        "scaled dot product attention, flash, efficient, math, cudnn": [
            getattr(kernels, f"{one}_sdp_enabled")() for one in ("flash", "mem_efficient", "math", "cudnn")
        ],
    }


def product_precision(precision: str) -> str:
    """Return `precision`, but "tf32" for "fp32" where torch is set to multiply fp32 matrices so on GPUs.

    By `torch.set_float32_matmul_precision` or `torch.backends.cuda.matmul`; by default fp32 stays fp32.
    """
    rounds = precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if rounds else precision


def visible_accelerators() -> int:
    """Return the number of GPUs that this process sees; 0 where torch is built without NCCL."""
    return torch.cuda.device_count() if dist.is_nccl_available() else 0


def default_device() -> torch.device:
    """Return CUDA where a GPU is visible, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else CPU


def accelerator_of_rank(local_rank: int, ranks_per_gpu: int = 1) -> torch.device:
    """Return the GPU of the rank with number `local_rank` on its host.

    The GPU of that number, or if ranks share one, neighbours the same; where the launcher shows each rank a
    single one, that. Raises `MeshError` for more ranks on a host than the GPUs that they see.
    """
    count, number = visible_accelerators(), local_rank // ranks_per_gpu
    if count > 1 and number >= count:
        raise MeshError(
            f"local rank {local_rank} sees {count} GPUs: start as many ranks on a host as it has GPUs, "
            "or show each rank its own by CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", number if number < count else 0)


def keep_stand_in_for_gpus() -> None:
    """Work around a crash of torch 2.11 without GPUs: make its dummy CUDA guard in a lasting thread.

    torch 2.11 for CUDA makes one on a machine without GPUs, in the memory of the first thread that traces,
    and reads it when that thread has ended: a segmentation fault. Later versions keep it.
    """
    is_lost = torch.__version__.startswith("2.11.") and torch.version.cuda and not torch.cuda.is_available()
    if not is_lost or any(thread.name == STAND_IN_THREAD for thread in threading.enumerate()):
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = threading.Event()

    def hold() -> None:
        try:
            with FakeTensorMode():
                pass
        finally:
            made.set()
        threading.Event().wait()

    threading.Thread(target=hold, name=STAND_IN_THREAD, daemon=True).start()
    made.wait()


def make_current(device: torch.device) -> None:
    """Make a GPU the current CUDA device of this thread: the default for its streams, events and memory."""
    if is_accelerator(device):
        torch.cuda.set_device(device)


def current_accelerator() -> torch.device:
    """Return the current GPU of this thread."""
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    """Block the host until the device has done all queued work; return at once for a CPU."""
    if is_accelerator(device):
        torch.cuda.synchronize(device)


def has_used_accelerator() -> bool:
    """Return whether this process has used a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def finish_queued_work(timeout: float) -> bool:
    """Block until this process's GPU has done all work, at most `timeout` seconds; return whether it has."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    done = threading.Event()

    def wait() -> None:
        torch.cuda.synchronize()
        done.set()

    threading.Thread(target=wait, name="plait-queued-work", daemon=True).start()
    return done.wait(min(timeout, threading.TIMEOUT_MAX))


def synchronize_stream(device: torch.device) -> None:
    """Block the host until the device's current stream has done all its work; return at once for a CPU."""
    if is_accelerator(device):
        torch.cuda.current_stream(device).synchronize()


class StreamEvent:
    """An event on a device's current stream that the host can wait for; on a CPU it is always done."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        """Record an event on the current stream of `device`; `timed`: for `milliseconds_since`, too."""
        self._device = device
        self.seconds = time.perf_counter()
        """When the event was recorded, on the host's clock."""
        self.event: torch.cuda.Event | None = None
        """torch's event; None on a CPU."""
        if is_accelerator(device):
            self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Block the host until the work before the event is done; any thread may call it."""
        if self.event is not None:
            with torch.cuda.device(self._device):  # a new thread starts on device 0
                self.event.synchronize()

    def is_done(self) -> bool:
        """Return whether the work before the event is done, without blocking; any thread may call it."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def milliseconds_since(self, earlier: StreamEvent) -> float:
        """Return the milliseconds from `earlier` to this event, both `timed`, done, and of one device."""
        if self.event is None or earlier.event is None:
            return (self.seconds - earlier.seconds) * 1e3
        return float(earlier.event.elapsed_time(self.event))


def copy_later(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target` on the current stream, without blocking the host if CPU memory is pinned.

    `source` must keep its value, and `target` not be read on the CPU, before a `StreamEvent` afterwards.
    """
    target.copy_(source, non_blocking=True)


def moved_later(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """Return `tensor` on `device`, copied with `non_blocking=True`; itself if there, unless `copy`.

    As for `copy_later`, `tensor` must keep its value until a `StreamEvent` afterwards.
    """
    return tensor.to(device, copy=copy, non_blocking=True)


def sent(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `tensor` on `device`, cast to `dtype` if given, copied without blocking the host.

    A tensor in CPU memory goes to a GPU through a pinned copy: from pageable memory the host would wait.
    Later writes to `tensor` do not change the result on a GPU.
    """
    if not is_accelerator(device) or is_accelerator(tensor):
        return tensor.to(device, dtype)
    return tensor.to(dtype=dtype).pin_memory().to(device, non_blocking=True)


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy `tensor` to the CPU; return a function that waits for the copy and returns it."""
    if not is_accelerator(tensor):
        return lambda: tensor
    copy = torch.empty_like(tensor, device=CPU, pin_memory=True)
    copy_later(copy, tensor)
    done = StreamEvent(tensor.device)

    def read() -> Tensor:
        done.wait()
        return copy

    return read


def host_zeros(size: int, dtype: torch.dtype, beside: torch.device) -> Tensor:
    """Return zeros in CPU memory, pinned where `beside` is a GPU, so that copies do not block."""
    return torch.zeros(size, dtype=dtype, pin_memory=is_accelerator(beside))


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """Return an uninitialised uint8 tensor of `size` bytes on the CPU, in pinned memory if `pinned`."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def peak_allocated(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU since torch's last reset of it, without cuBLAS workspaces.

    That is what torch's allocator has given out, less what cuBLAS keeps of it for its products.
    """
    return max(0, torch.cuda.max_memory_allocated(device) - library_workspace(device))


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors allocated on a GPU now, without cuBLAS workspaces; 0 on a CPU."""
    if not is_accelerator(device):
        return 0
    return max(0, torch.cuda.memory_allocated(device) - library_workspace(device))


def library_workspace(device: torch.device) -> int:
    """Return the bytes that cuBLAS and cuBLASLt keep allocated on a GPU after the first products.

    As torch chooses them: 32 MiB from compute capability 9 on, else about 8, for products in the thread that
    runs the backward, and 1 MiB for those with a bias (measured on an H100; see benchmarks/gpu).
    """
    newer = torch.cuda.get_device_capability(device)[0] >= 9
    return (32 * 2**20 if newer else 4096 * 2**11 + 16 * 2**13) + 2**20


def name_of(device: torch.device) -> str:
    """Return the product name of a GPU."""
    return torch.cuda.get_device_name(device)


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU, whether in use or not."""
    return torch.cuda.get_device_properties(device).total_memory


def limit_memory(device: torch.device, ranks: int, besides: int) -> None:
    """Limit this process's tensors on a GPU that `ranks` processes share to an equal part of its memory.

    `besides`: bytes that each process takes there besides tensors. More raises torch's out-of-memory error.
    """
    total = total_memory(device)
    torch.cuda.set_per_process_memory_fraction(max(0.0, total / ranks - besides) / total, device)


def nccl_version(library: str = "libnccl.so.2") -> tuple[int, ...]:
    """Return the version of the NCCL that this process uses, or of `library`: (2, 30, 7); () without NCCL.

    That is the library which was loaded with torch, or preloaded in its place; where NCCL is part of torch's
    own library, the version that torch was built with.
    """
    if not dist.is_nccl_available():
        return ()
    number = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        built: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return built
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors (SMs) of a GPU; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if is_accelerator(device) else 0


def accelerator_versions() -> dict[str, str]:
    """Return the versions of GPU software on this machine: `driver`, `CUDA`, `NCCL`, if present.

    The driver's is what `nvidia-smi` prints, CUDA's is the one that torch was built with.
    """
    found: dict[str, str] = {}
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=30).stdout.split()
        found |= {"driver": answer[0]} if answer else {}
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
    if dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, nccl_version()))
    return found


def keep_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores torch's random state, also that of a GPU, at its end."""
    return torch.random.fork_rng([device] if is_accelerator(device) else [])


RandomState = tuple[Tensor, Tensor | None]
"""States of the random number generators of the CPU and of the current GPU; None without a GPU."""


def random_state() -> RandomState:
    """Return the states of torch's default random number generators: the CPU's and the current GPU's.

    None for a GPU whose stream records a graph: its generator's state is then in the graph.
    """
    on_gpu = None
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        on_gpu = torch.cuda.get_rng_state()
    return torch.default_generator.get_state(), on_gpu


def set_random_state(state: RandomState) -> None:
    """Set torch's default random number generators to `state`, as `random_state` has returned it."""
    torch.default_generator.set_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def graph_pool() -> Any:
    """Return the handle of a new pool of GPU memory that CUDA graphs share."""
    return torch.cuda.graph_pool_handle()


class GraphStream:
    """A CUDA stream on which CUDA graphs are recorded (captured): one for all graphs of an engine.

    A backward runs on the stream of its forward, so both must be recorded on the same one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """Record this thread's GPU work within the context into `graph`, with memory from `pool`.

        Unlike `torch.cuda.graph` this does not wait for the GPU: it may be receiving from another rank, which
        waits for what this one sends later.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # of a recording that is not valid, which would hide the error
                    graph.capture_end()
                raise
            with warnings.catch_warnings():
                # Some segments have nothing to compute.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                graph.capture_end()
        current.wait_stream(self._stream)


class DeviceGraph:
    """A CUDA graph: the work of a function on a GPU, recorded once, and replayed on the same memory."""

    def __init__(self, stream: GraphStream, pool: Any) -> None:
        """`pool`: from `graph_pool`. Graphs that share one must be replayed in the order of recording."""
        self._stream, self._pool = stream, pool
        self._graph = torch.cuda.CUDAGraph()

    def recording(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's GPU work is recorded into the graph, not computed."""
        return self._stream.recording(self._graph, self._pool)

    def replay(self) -> None:
        """Launch the recorded work on the current stream, without waiting for its end."""
        self._graph.replay()
