"""Process groups by name.

Graphs name the group that a collective runs over and never hold it. A job opens its groups under a number of its own,
`"3/ep[4..31]"`, and `build` writes those names into its graphs: two jobs of one process never use each other's groups,
and a model whose job has ended is told so. All ranks of job 3 are `"3/"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from moec.runtime.errors import JobError

if TYPE_CHECKING:
    from moec.runtime.job.watch import Watch

# Process-wide, not thread-local: on CUDA, backward calls the collectives from autograd's own threads.
_groups: dict[str, ProcessGroup] = {}
_watches: dict[str, Watch] = {}
_open: set[str] = set()
_numbers = count()

ALL_RANKS, HOST = "", "host"
"""A job's names for the group of all its ranks, and for a group of the same ranks that takes CPU tensors."""

SEPARATOR = "/"
"""Between a job's number and the plan's name of a group; no such name contains it."""


class UnknownGroupError(RuntimeError):
    """A collective names a group that is not registered on this rank."""


def new_job() -> str:
    """What the names of a new job's groups begin with."""
    return f"{next(_numbers)}{SEPARATOR}"


@contextmanager
def opened(job: str, groups: Mapping[str, ProcessGroup], watch: Watch | None) -> Iterator[None]:
    """Lets collectives resolve a job's groups, by the plan's names of them, until the block ends.

    `watch` watches over the collectives of this job alone.
    """
    names = {job + name: group for name, group in groups.items()}
    _groups.update(names)
    _open.add(job)
    if watch is not None:
        _watches[job] = watch
    try:
        yield
    finally:
        for name in names:
            _groups.pop(name, None)
        _open.discard(job)
        _watches.pop(job, None)


def is_open(job: str) -> bool:
    """Whether the job whose groups' names begin with `job` is still running here."""
    return job in _open


@contextmanager
def use(groups: Mapping[str, ProcessGroup]) -> Iterator[None]:
    """Lets collectives resolve names outside of any job until the block ends; inner blocks shadow outer ones.

    The block must outlive backward, which runs collectives too.
    """
    global _groups
    outer = _groups
    _groups = {**outer, **groups}
    try:
        yield
    finally:
        _groups = outer


def resolve(name: str) -> ProcessGroup:
    """The process group called `name` on this rank.

    Raises `JobError` where the job that had it has ended, and `UnknownGroupError`, which lists the known names.
    """
    try:
        return _groups[name]
    except KeyError:
        if SEPARATOR in name:
            raise ended() from None
        known = ", ".join(f'"{other}"' for other in sorted(_groups)) or "none"
        message = (
            f'no process group is called "{name}" on this rank (known: {known}); '
            "collectives run inside `groups.use({name: group})`, and so does their backward"
        )
        raise UnknownGroupError(message) from None


def watch_of(name: str) -> Watch | None:
    """The watch over the collectives of the group called `name`, if there is one."""
    job, separator, _ = name.partition(SEPARATOR)
    return _watches.get(job + separator)


def plain_name(name: str) -> str:
    """What the plan calls a group; empty for those of all ranks."""
    plain = name.partition(SEPARATOR)[2] if SEPARATOR in name else name
    return "" if plain == HOST else plain


def ended() -> JobError:
    """The error for a model that is used after its job."""
    return JobError(
        "MOE0709",
        "the model communicates over process groups that went with its job",
        "use it inside of `with moec.launch(…) as job`; `model.state_dict()` still works",
    )
