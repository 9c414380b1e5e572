"""The extras of a checkpoint: read for this rank, and given to the script's objects."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from moec.grammar.suggest import nearest
from moec.runtime.checkpoint.format.index import EXTRAS
from moec.runtime.checkpoint.format.trees import decode
from moec.runtime.errors import JobError

if TYPE_CHECKING:
    from moec.runtime.checkpoint.loading import Loading


def read_extras(loading: Loading, asked: Mapping[str, Any], data_rank: int, data_size: int) -> None:
    """Reads the extras in `asked`, and all plain data. Raises `JobError` MOE0809 for an extra that does not fit."""
    checkpoint = loading.checkpoint
    stored = checkpoint.index.extras
    for name, receiver in asked.items():
        if name not in stored:
            known = ", ".join(stored) or "none"
            near = nearest(name, stored)
            help = f"did you mean `{near}=`?" if near else "leave it out, or load another one"
            raise _unfit(f"{checkpoint.path} has no extra {name}; it has {known}", help)
        if not _receives(receiver, loads=stored[name].loads):
            what = "an object's state" if stored[name].loads else "plain data"
            raise _unfit(
                f"{name} is {what} in the checkpoint, and a {type(receiver).__name__} here, which cannot take it",
                "give an object with `load_state_dict` for a state, a dict for a dict; other plain values are in the "
                "result of `job.load`",
            )
    for name, extra in stored.items():
        copies = len(extra.copies)
        if copies not in (1, data_size) and name in asked:
            raise _unfit(
                f"{name} differs between data ranks: the checkpoint has it for data_size {copies}, and here data_size "
                f"is {data_size}",
                "load it with as many data ranks, or leave it out and let it start over",
            )
        if (name not in asked and extra.loads) or copies not in (1, data_size):
            continue
        copy = data_rank if copies > 1 else 0
        try:
            loading.values[name] = decode(extra.copies[copy], partial(loading.read_plain, f"{EXTRAS}{name}/{copy}/"))
        except (ValueError, TypeError) as error:
            raise JobError("MOE0801", f"{checkpoint.path}: extra {name}: {error}") from error
        if name in asked and not extra.loads and not isinstance(loading.values[name], Mapping):
            raise _unfit(
                f"{name} is not a dict in the checkpoint, but job.load was given a dict for it",
                "read it from what `job.load` returns",
            )


def _receives(receiver: object, *, loads: bool) -> bool:
    return callable(getattr(receiver, "load_state_dict", None)) if loads else isinstance(receiver, MutableMapping)


def _unfit(message: str, help: str) -> JobError:
    return JobError("MOE0809", message, help)


def unread(loading: Loading, *, returned: bool) -> list[str]:
    """The extras that were not read; and those of plain data, unless values are `returned` to the script."""
    stored = loading.checkpoint.index.extras
    return [name for name, extra in stored.items() if name not in loading.values or not (extra.loads or returned)]


def give(loading: Loading, extras: Mapping[str, Any]) -> None:
    """Gives the extras their values. Raises `JobError` MOE0809 for one whose own methods raise."""
    for name, receiver in extras.items():
        value, loads = loading.values[name], loading.checkpoint.index.extras[name].loads
        try:
            if loads:
                receiver.load_state_dict(value)
            else:
                receiver.clear()
                receiver.update(value)
        except Exception as error:
            call = f"{name}.load_state_dict" if loads else f"{name}.clear or {name}.update"
            raise _unfit(
                f"{call} raised {type(error).__name__}: {str(error)[:300]}; model and optimizer have been loaded "
                "already",
                "give an object of the same class as the one that was saved",
            ) from error
