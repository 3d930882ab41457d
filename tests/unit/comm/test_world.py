import os

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend fake)

from plait.comm import coordinates, launcher_process
from plait.comm.launcher_process import parents_up_to_launcher
from plait.comm.mesh import Mesh
from plait.comm.transport import world_ranks
from plait.comm.world import World, find_world
from plait.comm.world_membership import join_world
from plait.errors import CommunicationError, MeshError
from plait.schedules.messages import channels_of
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


def test_alone():
    assert find_world({}) is None


def test_torchrun():
    assert find_world(TORCHRUN) == World(3, 4, 1, 2, "torchrun", "tcp://a:1")


def test_open_mpi_on_one_host():
    world = find_world(OPEN_MPI | {"MASTER_PORT": "4000"})
    assert world == World(1, 2, 1, 2, "openmpi", "tcp://127.0.0.1:4000")


def test_pmi():
    world = find_world({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"})
    assert world == World(0, 2, 0, 2, "pmi", "tcp://h:5")


def test_slurm_step_meets_at_its_first_host():
    world = find_world(SLURM)
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.local_size) == (5, 7, 1, 2)
    assert world.init_method.startswith("tcp://gpu03:")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("solo", "solo"), ("a1,a2", "a1"), ("r[2-3]n[07,9]", "r2n07"), ("x[1,3]-ib,y", "x1-ib")],
)
def test_first_host_of_a_node_list(nodes, host):
    world = find_world(SLURM | {"SLURM_STEP_NODELIST": nodes, "MASTER_PORT": "9"})
    assert world is not None
    assert world.init_method == f"tcp://{host}:9"


def test_the_port_depends_on_the_job_only():
    ports = [
        find_world(SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": rank}).init_method.split(":")[-1]
        for job, rank in [("1", "0"), ("1", "4"), ("2", "0")]
    ]
    assert ports[0] == ports[1] != ports[2]


def test_ranks_of_pmi_know_which_launcher_started_them(monkeypatch: pytest.MonkeyPatch):
    """MPICH gives no job id: two runs on one host would derive one port. Here this test's parent launches."""
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    world = find_world()
    assert world.job.split("-")[0] == str(parents_up_to_launcher("PMI_RANK")[os.getpid()])
    monkeypatch.setattr(launcher_process, "_read", lambda process, file: "proxy\0--control-port\0host:77\0")
    assert find_world().job == "host:77"
    assert find_world().init_method != world.init_method


def test_slurm_counts_the_ranks_of_a_host_where_it_starts_them_by_pmi2():
    variables = SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_JOBID": "77.0"}
    world = find_world(variables)
    assert (world.launcher, world.local_size) == ("pmi", 2)
    assert world.init_method.startswith("tcp://gpu03:")


def test_a_batch_script_and_a_single_task_stand_alone():
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a"}) is None
    assert find_world(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_the_innermost_launcher_wins():
    assert find_world(SLURM | OPEN_MPI | TORCHRUN).launcher == "torchrun"
    assert find_world(SLURM | OPEN_MPI).launcher == "openmpi"
    assert find_world(SLURM | {"PMI_RANK": "0", "PMI_SIZE": "2"}).launcher == "pmi"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_is_refused_with_the_missing_name(name):
    with pytest.raises(MeshError, match=f"not {name}: set"):
        find_world({key: value for key, value in TORCHRUN.items() if key != name})


def test_bad_values_are_refused():
    with pytest.raises(MeshError, match="WORLD_SIZE = 'four'"):
        find_world(TORCHRUN | {"WORLD_SIZE": "four"})
    with pytest.raises(MeshError, match="RANK = 4 is not a rank of WORLD_SIZE = 4"):
        find_world(TORCHRUN | {"RANK": "4"})
    with pytest.raises(MeshError, match="MASTER_PORT = 'http': it must be a number"):
        find_world(TORCHRUN | {"MASTER_PORT": "http"})


def test_several_hosts_need_an_address():
    with pytest.raises(MeshError, match="MASTER_ADDR is not set"):
        find_world(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_a_missing_peer_is_a_sentence(tmp_path):
    world = World(0, 2, 0, 2, "plait", f"file://{tmp_path}/store")
    with pytest.raises(CommunicationError, match="rank 0 of 2 could not join the world of plait"):
        join_world(world, timeout=0.3, device="cpu")


def test_devices_are_checked():
    with pytest.raises(MeshError, match="'tpu': choose one of"):
        join_world(World(0, 1, 0, 1, "plait", "env://"), device="tpu")


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (4, 4, 4), (16, 32, 8)], ids=["8", "64", "4096"])
@pytest.mark.parametrize(("splits", "groups"), [(False, 6), (True, None)], ids=["members", "all ranks"])
def test_groups_that_a_rank_takes_part_in(
    monkeypatch: pytest.MonkeyPatch, pp: int, dp: int, tp: int, splits: bool, groups: int | None
) -> None:
    """As many in a world of any size; with a `device_id` NCCL needs all ranks for each, 1,569 of 4,096."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(world_ranks, "new_process_group", lambda ranks, *_: made.append(ranks))
    monkeypatch.setattr(world_ranks, "splits_communicators", lambda: splits)
    monkeypatch.setattr(world_ranks, "backends_of", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: pp * dp * tp)
    ranks, sizes = world_ranks.Processes(), coordinates.sizes_of(pp=pp, dp=dp, tp=tp, replicate=1)
    for axis in (*sizes, "dp", "model", "world"):  # the others are the same groups without `cp`
        ranks.connect(list(coordinates.groups_along(axis, sizes)), axis, 1.0)
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
def test_store_operations_and_groups_of_a_start(pp: int, dp: int, tp: int) -> None:
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
