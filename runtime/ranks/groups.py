"""Process groups by name.

Graphs contain names of groups and no group. Each job has a number, which its groups' names begin with, as in
`"3/ep[4..31]"`; `"3/"` are the ranks of a stage of job 3. `build` writes the names into its graphs: jobs of one process
never use each other's groups, and a model whose job has ended raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from moec.runtime.errors import JobError

if TYPE_CHECKING:
    from moec.runtime.ranks.watch import Watch

# Process-wide, not thread-local: on CUDA, backward calls the collectives from autograd's own threads.
_groups: dict[str, ProcessGroup] = {}
_watches: dict[str, Watch] = {}
_open: set[str] = set()
_with_messages: set[str] = set()
_numbers = count()

STAGE, HOST, PIPELINE, TIED = "", "host", "pp", "tied"
"""The names, after a job's number, of the group of the ranks with this rank's pipeline stages, of the group of all
ranks for CPU tensors, of the ranks that run all stages for this rank's sequences, and of those among them that have a
parameter of several stages."""

SEPARATOR = "/"
"""Separates a job's number from the plan's name of a group, which never contains it."""


class UnknownGroupError(RuntimeError):
    """A collective names a group that is not registered on this rank."""


def new_job() -> str:
    """A new job's number: the prefix of its groups' names."""
    return f"{next(_numbers)}{SEPARATOR}"


@contextmanager
def opened(job: str, groups: Mapping[str, ProcessGroup], watch: Watch | None) -> Iterator[None]:
    """Registers a job's groups, by the plan's names, until the block ends.

    `watch` watches the collectives of this job only.
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
        _with_messages.discard(job)
        _watches.pop(job, None)


def is_open(job: str) -> bool:
    """Whether job number `job` is still running in this process."""
    return job in _open


def begin_messages(job: str) -> None:
    """Notes that messages between pipeline stages are on the way, until `end_messages`."""
    _with_messages.add(job)


def end_messages(job: str) -> None:
    """Notes that every message is sent and received."""
    _with_messages.discard(job)


def require_no_messages(job: str) -> None:
    """Raises `JobError` if an exception has ended a pass of a pipeline before all messages were sent and received."""
    if job in _with_messages:
        message = "an exception ended a step or an evaluation of this pipeline, whose messages may still be on the way"
        raise JobError("MOE0752", message, "let it end the job, and go on from the last checkpoint")


@contextmanager
def use(groups: Mapping[str, ProcessGroup]) -> Iterator[None]:
    """Registers groups outside of any job until the block ends; inner blocks shadow outer ones.

    Call backward inside the block: it runs collectives too.
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

    Raises `JobError` if its job has ended, and `UnknownGroupError`, which lists the known names.
    """
    try:
        return _groups[name]
    except KeyError:
        if SEPARATOR in name:
            raise ended_error() from None
        known = ", ".join(f'"{group}"' for group in sorted(_groups)) or "none"
        message = (
            f'no process group is called "{name}" on this rank (known: {known}); '
            "run collectives and their backward inside `groups.use({name: group})`"
        )
        raise UnknownGroupError(message) from None


def watch_of(name: str) -> Watch | None:
    """The watch of the job that the group called `name` belongs to, if it has one."""
    job, separator, _ = name.partition(SEPARATOR)
    return _watches.get(job + separator)


def plain_name(name: str) -> str:
    """The name of a group without its job's number."""
    return name.partition(SEPARATOR)[2] if SEPARATOR in name else name


def not_begun_error(name: str) -> JobError:
    """The error for a job that is used before its `with`."""
    return JobError(
        "MOE0752",
        f"the job of plan `{name}` has not begun",
        "use it inside of `with moec.launch(plan) as job:`",
    )


def ended_error() -> JobError:
    """The error for a model that is used after its job."""
    return JobError(
        "MOE0709",
        "the model communicates over process groups that its job has closed",
        "use it inside of `with moec.launch(…) as job`; `model.state_dict()` still works",
    )
