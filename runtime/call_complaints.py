"""Calls that do not fit a function's signature: what is wrong with the arguments, and how to call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

from moec.grammar.suggest import nearest
from moec.runtime.errors import CallError, wrong_argument

BY_POSITION = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD


def complaint(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], hints: Mapping[str, str]
) -> CallError | None:
    """The error for a call that does not fit the signature; None if it fits."""
    parameters = dict(signature(function).parameters)
    parameters.pop("self", None)
    values = args[1:] if "self" in signature(function).parameters else args
    usage = f"call it as `{name}({', '.join(_usage(parameters))})`"
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    positional = [key for key, p in parameters.items() if p.kind in BY_POSITION]
    if not takes_any and (unknown := next((key for key in kwargs if key not in parameters), None)):
        meant = nearest(unknown, parameters)
        help = hints.get(unknown) or (f"did you mean `{meant}`? " if meant else "") + usage
        return wrong_argument(f"`{name}` has no argument `{unknown}`", help)
    if len(values) > len(positional) and not any(p.kind is Parameter.VAR_POSITIONAL for p in parameters.values()):
        takes = f"{len(positional)} argument{'s' * (len(positional) != 1)} by position"
        named = [key for key, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY]
        help = f"{usage}; by name: {', '.join(named)}" if named else usage
        return wrong_argument(f"`{name}` takes {takes}, and got {len(values)}", help)
    if twice := next((key for key in positional[: len(values)] if key in kwargs), None):
        return wrong_argument(f"`{name}` got `{twice}` twice, by position and by name", usage)
    missing = [
        key
        for index, (key, p) in enumerate(parameters.items())
        if p.default is Parameter.empty
        and p.kind in (*BY_POSITION, Parameter.KEYWORD_ONLY)
        and key not in kwargs
        and not (p.kind in BY_POSITION and index < len(values))
    ]
    if not missing:
        return None
    packed = next((value for value in values if isinstance(value, Mapping | tuple | list)), None)
    unpack = [] if packed is None else [f"a {type(packed).__name__} is not unpacked: give its tensors, one by one"]
    help = "; ".join([usage, *unpack, *(hints[key] for key in missing if key in hints)])
    return wrong_argument(f"`{name}` needs {' and '.join(f'`{key}`' for key in missing)}", help)


def _usage(parameters: Mapping[str, Parameter]) -> Iterator[str]:
    """The arguments that a call must have, and `…` if there are others."""
    for name, p in parameters.items():
        if p.default is Parameter.empty and p.kind in BY_POSITION:
            yield name
        elif p.default is Parameter.empty and p.kind is Parameter.KEYWORD_ONLY:
            yield f"{name}=…"
        elif p.kind is Parameter.VAR_POSITIONAL:
            yield f"*{name}"
    if any(p.default is not Parameter.empty or p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        yield "…"
