"""Joining a job: the process group of all ranks, and a plan's meshes and groups over it."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from moec.codegen.launch_command import start_command
from moec.codegen.plan import Plan
from moec.passes.ir import Mesh
from moec.passes.ir.mesh import CUT_ORDER, group_name
from moec.runtime.errors import JobError, is_whole, wrong_argument
from moec.runtime.ranks.groups import HOST, PIPELINE, STAGE, TIED
from moec.runtime.ranks.verdict import ranks_text

MOST_ABSENT = 8
"""Ranks that a message names."""

_joined: Counter[tuple[str, str]] = Counter()
"""Counts the process groups that this process has made at each address; equal on all ranks, which run one script."""


@dataclass(slots=True)
class _OwnGroup:
    """The process group of all ranks, made by a job, with the longest timeout of its jobs, and how many use it now."""

    group: ProcessGroup
    timeout: timedelta
    jobs: int = 0


_own_groups: list[_OwnGroup] = []
_prefixed = set[int]()
"""The rank in this process's `sys.excepthook`, once a process group was made."""


@contextmanager
def joined(rank: int, world_size: int, device_type: str, timeout: timedelta) -> Iterator[None]:
    """The process group of all ranks until the block ends: the process's, or a new one where it has none.

    A new group ends with the last job that uses it, in whatever order jobs end.
    """
    if not dist.is_initialized():
        hook = sys.excepthook
        _join(rank, world_size, device_type, timeout)
        if _prefixed:  # by torch, which puts `[rank0]:` before a traceback once more for each process group
            sys.excepthook = hook
        _prefixed.add(rank)
        assert dist.group.WORLD is not None
        _own_groups[:] = [_OwnGroup(dist.group.WORLD, timeout)]
    own_group = next((group for group in _own_groups if group.group is dist.group.WORLD), None)
    if own_group is None:  # the script's own group
        yield
        return
    own_group.jobs += 1
    if timeout > own_group.timeout:  # each job's watch keeps the job's own
        own_group.timeout = timeout
        distributed_c10d._set_pg_timeout(timeout, own_group.group)
    try:
        yield
    finally:
        own_group.jobs -= 1
        if not own_group.jobs and own_group.group is dist.group.WORLD:
            _own_groups.clear()
            dist.destroy_process_group()


def _join(rank: int, world_size: int, device_type: str, timeout: timedelta) -> None:
    """Makes the process group of all ranks, from torchrun's environment where there is one."""
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "MASTER_ADDR" not in os.environ:
        assert world_size == 1
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=timeout))
    # The agent's store still has the addresses of an earlier attempt and of this process's earlier jobs.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    address = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    store = PrefixStore(f"attempt_{attempt}_job_{_joined[address]}", store)
    _joined[address] += 1
    store.set(_arrival_key(rank), "")
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:
        absent = _absent(store, world_size)
        if not absent:
            raise
        verb = "has" if len(absent) == 1 else "have"
        raise JobError(
            "MOE0705",
            f"{ranks_text(absent)} {verb} not joined within {timeout.total_seconds():g} s",
            "look there for what ends the process before `moec.launch`, or takes so long; `timeout=` waits longer",
        ) from error


def _absent(store: Store, world_size: int) -> list[int]:
    """The first ranks that have not written their arrival key; none where the store is gone too."""
    try:
        return list(islice((rank for rank in range(world_size) if not store.check([_arrival_key(rank)])), MOST_ABSENT))
    except RuntimeError:
        return []


def _arrival_key(rank: int) -> str:
    return f"here{rank}"


def require_world_size(plan: Plan, world_size: int) -> None:
    """Raises `JobError` unless there are as many processes as the plan has ranks."""
    ranks = plan.world_size
    if world_size == ranks:
        return
    processes = f"this job has {world_size}"
    if world_size == 1 and "RANK" not in os.environ:
        processes = "this script was started as one process"
    raise JobError(
        "MOE0701",
        f"the plan is for {ranks} ranks, but {processes}",
        f"start it with `{start_command(plan, 'PLAN', _script())}`, or compile the file for a cluster of {world_size}",
    )


def _script() -> list[str]:
    """This script and its arguments."""
    is_script = sys.argv[0].endswith(".py") and sys.modules["__main__"].__spec__ is None
    return sys.argv if is_script else ["train.py"]


def require_arguments(device: str | None, check_replicas: int, timeout: float) -> None:
    """Raises `CallError` for arguments that `moec.launch` does not take."""
    if not is_whole(check_replicas) or check_replicas < 0:
        message = f"check_replicas must be a number of steps, or 0 for never, not {check_replicas!r}"
        raise wrong_argument(message, "`check_replicas=100` compares replicas at every 100th step")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        message = f"timeout must be a number of seconds above 0, not {timeout!r}"
        raise wrong_argument(message, "a number, such as `timeout=600`; the default is 100 seconds")
    if device not in (None, "cpu", "cuda"):
        raise wrong_argument(f"device must be 'cpu' or 'cuda' (for AMD GPUs too), not {device!r}", _device_help(device))
    if device == "cuda" and not torch.cuda.is_available():
        help = "leave `device` out to take what there is; `moec.launch(plan, device='cpu')` runs on the CPU"
        raise wrong_argument("device is 'cuda', but torch finds no GPU", help)


def _device_help(device: object) -> str:
    name = str(device).partition(":")[0]
    if name in ("cuda", "gpu", "hip", "rocm", "nvidia"):
        return "write `device='cuda'`: each process takes the GPU of its LOCAL_RANK, which torchrun sets"
    if name == "cpu":
        return "write `device='cpu'`"
    return "leave it out: a GPU if torch finds one, else the CPU"


def new_connection() -> Store:
    """The store of all ranks, over a connection of its own."""
    store: Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def device_meshes(meshes: Mapping[str, Mesh], device_type: str, pipeline: int = 1) -> dict[str, DeviceMesh]:
    """A plan's meshes as DeviceMeshes over their axes of more than one rank; meshes of one rank are left out.

    Axes are in the order in which they cut a dim: DTensor knows no other. On each of the ranks of a `pipeline` the
    meshes are of other ranks; every rank makes the groups of all of them.
    """
    by_name = {}
    for name, mesh in meshes.items():
        axes = mesh.wide_axes()
        if axes:
            ranks = torch.arange(pipeline * mesh.ranks).reshape([pipeline, *(mesh.size(axis) for axis in axes)])
            in_order = tuple(sorted(axes, key=CUT_ORDER.index))
            ranks = ranks.permute([0, *(1 + axes.index(axis) for axis in in_order)])
            if pipeline == 1:
                by_name[name] = DeviceMesh(device_type, ranks[0], mesh_dim_names=in_order)
            else:
                by_name[name] = DeviceMesh(device_type, ranks, mesh_dim_names=("pp", *in_order))[in_order]
    return by_name


def forget_meshes(meshes: Iterable[DeviceMesh]) -> None:
    """Empties DTensor's caches, which outlive a job, and drops the groups of `meshes`, which parameters keep.

    The caches find a mesh by its shape and return that of an earlier job, whose groups have ended: `full_tensor()`
    would not find them, or find others of the same name. They also keep the connections of every job open.

    Gloo's threads end with their group. One that frees its last work while the interpreter ends aborts the process, or
    waits for it for ever (torch 2.13: such works have Python objects, which threads then may not touch).
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    for mesh in meshes:
        getattr(mesh, "_pg_registry", {}).clear()  # torch.compile's; collectives find groups by their names


def process_groups(
    plan: Plan, meshes: Mapping[str, DeviceMesh], device_type: str, timeout: timedelta
) -> dict[str, ProcessGroup]:
    """A job's process groups by the plan's names, and `STAGE`, `HOST` and, of several stages, `PIPELINE`.

    Ranks with a parameter of several stages also have `TIED`. The dense mesh of `plan` has joint axes, which no
    DeviceMesh has.
    """
    by_name: dict[str, ProcessGroup] = {}
    for name, mesh in meshes.items():
        for axis in mesh.mesh_dim_names or ():
            by_name[group_name(axis, name if name != "dense" else None)] = mesh.get_group(axis)
    if plan.world_size > 1:
        firsts = range(0, plan.world_size, plan.stage_size)
        lists = {STAGE: [list(range(first, first + plan.stage_size)) for first in firsts]}
        lists |= {axis: [list(ranks) for ranks in plan.groups[axis]] for axis in plan.meshes["dense"].joint_axes()}
        if plan.pipeline > 1:
            places = range(plan.stage_size)
            lists[PIPELINE] = [[first + place for first in firsts] for place in places]
            for owners in plan.owners_of_tied.values():
                lists[TIED] = [[firsts[owner] + place for owner in owners] for place in places]
        groups = {name: _group_of(of_ranks) for name, of_ranks in lists.items()}
        by_name |= {name: group for name, group in groups.items() if group is not None}
        takes_cpu_tensors = device_type == "cpu" or "cpu:" in str(dist.get_backend_config())
        by_name[HOST] = _world() if takes_cpu_tensors else dist.new_group(backend="gloo")
    for group in by_name.values():
        # New groups have torch's default timeout of 30 minutes. The group of all ranks has its jobs' longest.
        if group is not dist.group.WORLD:
            distributed_c10d._set_pg_timeout(timeout, group)
    return by_name


def _group_of(lists: list[list[int]]) -> ProcessGroup | None:
    """The group of this rank in lists that have each rank at most once, or the group of all ranks; None in no list."""
    if len(lists) == 1 and len(lists[0]) == dist.get_world_size():
        return _world()
    group: ProcessGroup | None = dist.new_subgroups_by_enumeration(lists)[0]  # type: ignore[no-untyped-call]
    return group


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def number_in_store(rank: int) -> int:
    """The number of the job that begins now, among the jobs over the store of all ranks. Its ranks meet there by it.

    Each rank counts its own jobs: all ranks enter the same jobs over one store, whatever their processes had before.
    """
    return int(distributed_c10d._get_default_store().add(f"jobs_{rank}", 1))


def await_groups(number: int, world_size: int) -> None:
    """Waits until every rank has made its groups. Raises `JobError` after the groups' timeout.

    A rank that raised and ended sooner would break a slow rank's connections, and that rank would show another error.
    """
    store = PrefixStore(f"groups_{number}", distributed_c10d._get_default_store())
    if store.add("made", 1) == world_size:
        store.set("all", "")
    try:
        store.wait(["all"])
    except RuntimeError as error:
        message = "a rank has not made its process groups in time"
        raise JobError("MOE0705", message, "look there for what ends the process in `moec.launch`") from error
