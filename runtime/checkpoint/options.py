"""Checks the options of saves and loads, and refuses extras whose names are misspelt options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moec.grammar.suggest import is_slip
from moec.runtime.errors import is_whole, wrong_argument

SCHEDULE = ("every", "seconds", "on_signal")
OPTIMIZER = "optimizer"
OPTIONS_ELSEWHERE = {
    **dict.fromkeys(
        ("keep_last", "keep_last_n", "max_to_keep", "num_to_keep", "save_total_limit", "total_limit"), "keep"
    ),
    **dict.fromkeys(("interval", "save_every", "save_interval", "save_steps"), "every"),
}
"""Names that other libraries have for options."""
REFUSED_EXTRAS = {
    **dict.fromkeys(("must_exist", "required"), "leave it out: `moec.latest(folder)` is None without a checkpoint"),
    **dict.fromkeys(("map_location", "device"), "leave it out: tensors go where the model's are"),
    "strict": "leave it out: a checkpoint has every parameter of its model",
    "weights_only": "leave it out: nothing of a checkpoint is executed; without an optimizer only weights are loaded",
}
"""Options of other libraries that moec has no use for, with what to do instead; they are no names of extras."""


def require_path(call: str, name: str, path: object, then: str = "") -> None:
    """Raises `CallError` unless `path`, the first argument of `call`, is a path. `then`: the arguments after it."""
    if not isinstance(path, str | os.PathLike):
        message = f"`{name}` must be a path, not an object of class {type(path).__name__}"
        example = "checkpoints/100" if name == "path" else "checkpoints"
        one = f"; that of step {path} is the folder 'checkpoints/{path}'" if is_whole(path) and not then else ""
        raise wrong_argument(message, f"{'the path comes first: ' if then else ''}`{call}('{example}'{then})`{one}")


def require_extras(call: str, extras: Mapping[str, Any], options: tuple[str, ...], optimizer: object) -> None:
    """Raises `CallError` for an extra whose name is a misspelt option or one of another library.

    An object with `state_dict` is no value of `options`; but it may be the optimizer, if `optimizer` is None.
    """
    for name, value in extras.items():
        if name in REFUSED_EXTRAS and not hasattr(value, "state_dict"):
            raise wrong_argument(f"`{call}` has no argument `{name}`", REFUSED_EXTRAS[name])
        allowed = options
        if hasattr(value, "state_dict"):
            allowed = (OPTIMIZER,) if optimizer is None else ()
        for option in allowed:
            if is_slip(name, option) or is_slip(option, name) or OPTIONS_ELSEWHERE.get(name) == option:
                help = f"did you mean `{option}`? An extra needs a name that is less like an option's"
                raise wrong_argument(f"`{call}` has no argument `{name}`", help)


def require_schedule(every: object, seconds: object, on_signal: object) -> None:
    """Raises `CallError` unless the options are valid and one of them says when to save."""
    if every is None and seconds is None and on_signal is None:
        raise wrong_argument(
            "`job.checkpoint` does not know when to save",
            "say when: `every=100`, `seconds=600` or `on_signal=signal.SIGTERM`, or several of them",
        )
    if every is not None and not _is_count(every):
        help = "`every=100` saves at every 100th step"
        raise wrong_argument(f"every must be a number of steps, at least 1, not {every!r}", help)
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        help = "`seconds=600` saves every ten minutes"
        raise wrong_argument(f"seconds must be a number above 0, not {seconds!r}", help)
    if on_signal is not None and not _is_count(on_signal):
        help = "`import signal`, and `on_signal=signal.SIGTERM`"
        raise wrong_argument(f"on_signal must be the number of a signal, not {on_signal!r}", help)


def require_keep(keep: object) -> None:
    """Raises `CallError` unless `keep` is a whole number from 1, or None."""
    if keep is not None and not _is_count(keep):
        help = "`keep=3` leaves the last three; leave it out to keep all"
        raise wrong_argument(f"keep must be a number of checkpoints, at least 1, not {keep!r}", help)


def _is_count(value: object) -> bool:
    return is_whole(value) and value >= 1
