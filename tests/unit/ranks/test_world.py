import os
import zlib

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend fake)

from plait.errors import CommunicationError, MeshError
from plait.plan import axes
from plait.ranks import launcher_processes
from plait.ranks.launch.world_membership import join_world
from plait.ranks.launcher_environment import World, find_world, without_launcher
from plait.ranks.launcher_processes import environment_of, parents_up_to_launcher
from plait.ranks.mesh import Mesh
from plait.ranks.transport import process_ranks
from plait.schedules.lowering.messages import channels_of
from plait.schedules.named_schedules import policy_schedule

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
    "SLURM_JOB_ID": "77",
}


def test_without_a_launchers_variables_there_is_no_world():
    assert find_world({}) is None


def ports_of(job: str) -> list[int]:
    """Below the ephemeral range, from the job."""
    return [10_000 + zlib.crc32(f"{job}/{turn}".encode()) % 20_000 for turn in range(4)]


def derived(job: str, rank: int, size: int, local: int, local_size: int, launcher: str, host: str) -> World:
    first, *others = ports_of(job)
    return World(
        rank,
        size,
        local,
        local_size,
        launcher,
        f"tcp://{host}:{first}",
        tuple(others),
        job,
        agent_store=False,
    )


AGENT = {"TORCHELASTIC_RUN_ID": "run 5", "TORCHELASTIC_USE_AGENT_STORE": "True"}
ON_TWO_HOSTS = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
JOB_IDS = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "n", "OMPI_MCA_ess_base_jobid": "9"}
WORLDS = {
    "torchrun": (TORCHRUN, World(3, 4, 1, 2, "torchrun", "tcp://a:1")),
    "its agent": (
        TORCHRUN | AGENT | {"SLURM_JOB_ID": "7"},
        World(3, 4, 1, 2, "torchrun", "tcp://a:1", (), "run 5", agent_store=True),
    ),
    "by hand": (
        {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
        World(3, 4, 3, 4, "torchrun", "tcp://a:1"),
    ),
    "more places on a host than ranks": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
        World(3, 4, 1, 4, "torchrun", "tcp://a:1"),
    ),
    "a port": (
        OPEN_MPI | AGENT | {"MASTER_PORT": "4000"},
        World(1, 2, 1, 2, "openmpi", "tcp://127.0.0.1:4000"),
    ),
    "the last port": (
        OPEN_MPI | {"MASTER_PORT": "65535", "MASTER_ADDR": "h"},
        World(1, 2, 1, 2, "openmpi", "tcp://h:65535"),
    ),
    "several hosts": (
        ON_TWO_HOSTS | JOB_IDS | {"MASTER_ADDR": "h"},
        derived("7 1 n 9", 5, 6, 1, 4, "openmpi", "h"),
    ),
    "a job on several hosts": (
        ON_TWO_HOSTS | {"SLURM_NODELIST": "gpu[7-9]", "PBS_JOBID": "p"},
        derived("p", 5, 6, 1, 4, "openmpi", "gpu7"),
    ),
    "pmi": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, derived("", 0, 2, 0, 2, "pmi", "127.0.0.1")),
    "Intel MPI": (
        {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        | {"MASTER_ADDR": "h", "PMI_JOBID": "j"},
        derived("j", 3, 6, 1, 2, "pmi", "h"),
    ),
    "slurm": (SLURM, derived("77", 5, 7, 1, 2, "slurm", "gpu03")),
    "slurm, the last host": (
        SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"},
        derived("77", 6, 7, 0, 1, "slurm", "gpu03"),
    ),
    "slurm, hosts alike": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "1"},
        derived("77", 5, 7, 1, 3, "slurm", "gpu03"),
    ),
    "slurm without a number of tasks in the step": (
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NUM_TASKS"},
        derived("77", 5, 7, 1, 2, "slurm", "gpu03"),
    ),
    "slurm starts by pmi2": (
        SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_JOBID": "77.0"},
        derived("77 77.0", 5, 7, 1, 2, "pmi", "gpu03"),
    ),
    "mpirun with fewer ranks in a step": (
        SLURM | {"PMI_RANK": "1", "PMI_SIZE": "2"},
        derived("77", 1, 2, 1, 2, "pmi", "127.0.0.1"),
    ),
}
"""What launchers tell a rank, and the whole of the world that it is in."""


def test_the_world_is_read_from_each_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMI_RANK", raising=False)
    for name, (variables, world) in WORLDS.items():
        assert find_world(variables) == world, name


def test_the_first_host_of_a_slurm_node_list_is_found() -> None:
    hosts = {"solo": "solo", "a1,a2": "a1", "r[2-3]n[07,9]": "r2n07", "x[1,3]-ib,y": "x1-ib"}
    for nodes, host in hosts.items():
        world = find_world(SLURM | {"SLURM_STEP_NODELIST": nodes, "MASTER_PORT": "9"})
        assert world is not None
        assert world.init_method == f"tcp://{host}:9"


def test_ranks_of_pmi_know_which_launcher_started_them(monkeypatch: pytest.MonkeyPatch):
    """MPICH gives no job id: two runs on one host would derive one port. Here this test's parent launches."""
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    world = find_world()
    assert world.job.split("-")[0] == str(parents_up_to_launcher("PMI_RANK")[os.getpid()])
    told = "proxy\0--control-port\0host:77\0"
    monkeypatch.setattr(launcher_processes, "_process_file", lambda process, file: told)
    assert find_world().job == "host:77"
    assert find_world().init_method != world.init_method


def test_the_initial_environment_of_a_process_is_read_from_proc():
    assert f"PATH={os.environ['PATH']}" in environment_of(os.getpid())
    assert environment_of(2**30) == []


def test_a_batch_script_and_a_single_task_stand_alone():
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a"}) is None
    assert find_world(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_the_innermost_launcher_wins():
    assert find_world(SLURM | OPEN_MPI | TORCHRUN).launcher == "torchrun"
    assert find_world(SLURM | OPEN_MPI).launcher == "openmpi"
    assert find_world(SLURM | {"PMI_RANK": "0", "PMI_SIZE": "2"}).launcher == "pmi"


def test_an_incomplete_set_of_launcher_variables_is_refused_by_name():
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(MeshError, match=f"not {name}: set"):
            find_world({key: value for key, value in TORCHRUN.items() if key != name})


REFUSED = {
    "WORLD_SIZE = 'four'": {"WORLD_SIZE": "four"},
    "LOCAL_RANK = '-1'": {"LOCAL_RANK": "-1"},
    "RANK = 4 is not a rank of WORLD_SIZE = 4": {"RANK": "4"},
    "MASTER_PORT = 'http': it must be a number": {"MASTER_PORT": "http"},
    "MASTER_PORT = '0': it must be a number": {"MASTER_PORT": "0"},
    "MASTER_PORT = '65536': it must be a number": {"MASTER_PORT": "65536"},
}


def test_invalid_launcher_variables_are_refused():
    for told, changed in REFUSED.items():
        with pytest.raises(MeshError, match=told):
            find_world(TORCHRUN | changed)


def test_several_hosts_need_an_address():
    with pytest.raises(MeshError, match="MASTER_ADDR is not set"):
        find_world(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_a_rank_that_does_not_join_is_reported_in_one_sentence(tmp_path):
    world, before = World(0, 2, 0, 2, "plait", f"file://{tmp_path}/store"), dict(os.environ)
    with pytest.raises(CommunicationError, match="rank 0 of 2 could not join the world of plait"):
        join_world(world, timeout=0.3, device="cpu")
    assert dict(os.environ) == before


def test_joining_a_world_refuses_an_unknown_device():
    with pytest.raises(MeshError, match="'tpu': choose one of"):
        join_world(World(0, 1, 0, 1, "plait", "env://"), device="tpu")


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (4, 4, 4), (16, 32, 8)], ids=["8", "64", "4096"])
@pytest.mark.parametrize(("splits", "groups"), [(False, 6), (True, None)], ids=["members", "all ranks"])
def test_a_mesh_makes_each_rank_only_the_groups_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch, pp: int, dp: int, tp: int, splits: bool, groups: int | None
) -> None:
    """As many in a world of any size; with a `device_id` NCCL needs all ranks for each, 1,569 of 4,096."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(process_ranks, "new_process_group", lambda ranks, *_: made.append(ranks))
    monkeypatch.setattr(process_ranks, "splits_communicators", lambda: splits)
    monkeypatch.setattr(process_ranks, "backends_of", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: pp * dp * tp)
    ranks, sizes = process_ranks.Processes(), axes.sizes_of(pp=pp, dp=dp, tp=tp, replicate=1)
    for axis in (*sizes, "dp", "model", "world"):  # the others are the same groups without `cp`
        ranks.connect(list(axes.groups_along(axis, sizes)), axis, 1.0)
    everyone = pp * dp + pp * tp + dp * tp  # tp, shard, pp
    assert len(made) == (groups or everyone + pp * tp + dp + 1)  # dp, model, world


class CountingStore(dist.Store):
    """A store for a rank whose world is not there; keeps the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def add(self, key: str, value: int) -> int:
        self.operations.append(f"add {key}")
        return value

    def set(self, key: str, value: str) -> None:
        self.operations.append(f"set {key}")

    def get(self, key: str) -> bytes:
        self.operations.append(f"get {key}")
        return b""

    def check(self, keys: list[str]) -> bool:
        self.operations.append(f"check {keys}")
        return False

    def wait(self, keys: list[str], *timeout: object) -> None:
        self.operations.append(f"wait {keys}")


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (4, 4, 4), (16, 32, 8)], ids=["8", "64", "4096"])
def test_the_store_operations_of_making_a_mesh_do_not_grow_with_the_world(pp: int, dp: int, tp: int) -> None:
    """plait's own, as many in a world of any size; Gloo adds its own for each group, by the group's size."""
    store = CountingStore()
    dist.init_process_group("fake", store=store, rank=5, world_size=pp * dp * tp)
    try:
        before = len(store.operations)
        mesh = Mesh(pp=pp, dp=dp, tp=tp)
        own = mesh.channel_groups(channels_of(policy_schedule("1f1b", pp, pp)))
        (numbers_the_mesh,) = store.operations[before:]  # for the names of groups, and the failure log
        assert numbers_the_mesh.startswith("add ")
        assert len(dist.distributed_c10d._world.pg_names) == 1 + 6 + len(own)
        assert len(own) == 2  # a rank of the first or last stage
    finally:
        dist.destroy_process_group()


def test_ranks_of_a_supervisor_have_no_variables_of_its_launcher() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "HOME": "here"}
    left = without_launcher(slurm)
    assert find_world(left) is None
    assert {"HOME", "SLURM_JOB_ID"} <= set(left)
    alone = {"SLURM_PROCID": "0", "HOME": "here"}
    assert without_launcher(alone) == alone
