"""Process groups by name.

Graphs name the group a collective runs over (`"ep[4..31]"`) and never hold it, so that one graph serves every rank.
What a name means on this rank is registered here while a job runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import ProcessGroup

# Process-wide, not thread-local: on CUDA, backward calls the collectives from autograd's own threads.
_groups: dict[str, ProcessGroup] = {}


class UnknownGroupError(RuntimeError):
    """A collective names a group that nobody registered on this rank."""


@contextmanager
def use(groups: Mapping[str, ProcessGroup]) -> Iterator[None]:
    """Let collectives resolve these names until the block ends; inner blocks shadow outer ones.

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

    Raises `UnknownGroupError`, which lists the names that are known.
    """
    try:
        return _groups[name]
    except KeyError:
        known = ", ".join(f'"{other}"' for other in sorted(_groups)) or "none"
        message = (
            f'no process group is called "{name}" on this rank (known: {known}); '
            "collectives run inside `groups.use({name: group})`, and so does their backward"
        )
        raise UnknownGroupError(message) from None
