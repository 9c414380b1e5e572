"""Renders Triton source from layer shapes: one template per family of kernels, with every number as a constant.

Nothing here imports torch or triton. The text depends on the shape alone, and moec runs only text that it rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache, lru_cache
from typing import Any, ClassVar

from moec.passes.ir.activations import ACTIVATIONS

DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Triton's names of the dtypes that kernels compute in."""

SCORES = ("softmax", "sigmoid")

MAX_EXPERTS = 2048
"""One program loads a whole row of logits, or of a histogram."""

MAX_RANKS = 1024
"""Ranks of a group whose copies of experts kernels split rows among: one program has those of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """The numbers that a family of kernels is rendered for."""

    template: ClassVar[str]

    @property
    def name(self) -> str:
        """An identifier that contains every field of the shape that is not None: `route_experts8_k2_scoresoftmax_…`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = (f"{name}{_short(value)}" for name, value in values.items() if value is not None)
        return "_".join((self.template, *parts))

    def constants(self) -> dict[str, Any]:
        """The template's constants that are not fields."""
        return {}

    def pointers(self) -> dict[str, str]:
        """The dtypes of tensors that differ from the shape's dtype, by argument name."""
        return {}

    def blocks(self, kernel: str) -> dict[str, tuple[int, ...]]:
        """The blocks that a kernel reads by TMA descriptors, by argument name; empty if it reads by pointers only."""
        return {}

    def options(self, kernel: str, family: str) -> dict[str, int]:
        """Triton's num_warps and num_stages for a kernel on a family of devices; empty for Triton's own."""
        return {}


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def accumulator(dtype: str) -> str:
    """The dtype of sums: float64 for float64, else float32."""
    return "fp64" if dtype == "fp64" else "fp32"


@cache
def render(shape: KernelShape) -> str:
    """The source of a shape's kernels: a Python module that imports triton and defines jitted functions.

    Raises `ValueError` for a shape that kernels do not support.
    """
    problem = complaint(shape)
    if problem is not None:
        raise ValueError(problem)
    constants = {field.name: getattr(shape, field.name) for field in fields(shape)}
    dtype = getattr(shape, "dtype", "fp32")
    constants |= {"acc": DTYPES[accumulator(dtype)], "type": DTYPES[dtype]}
    text = _environment().get_template(f"{shape.template}.py.j2").render(**constants, **shape.constants())
    return re.sub(r"\n+(@triton\.jit.*)\n", r"\n\n\n\1\n", text).strip() + "\n"


def complaint(shape: KernelShape) -> str | None:
    """The reason that a shape has no kernels; None if it has. Without kernels plain torch computes, or refuses."""
    experts, score = getattr(shape, "experts", 1), getattr(shape, "score", SCORES[0])
    activation = getattr(shape, "activation", None)
    if experts > MAX_EXPERTS:
        return f"kernels are for at most {MAX_EXPERTS} experts, not {experts}"
    if (ranks := getattr(shape, "ranks", 1)) > MAX_RANKS:
        return f"kernels are for at most {MAX_RANKS} ranks of a group, not {ranks}"
    if score not in SCORES or activation not in (None, *ACTIVATIONS):
        return f"there are no kernels for {score} scores and {activation}"
    if any(isinstance(size, int) and size < 0 for size in astuple(shape)):
        return "there are no kernels for a negative size"
    return None


def _short(value: object) -> str:
    return re.sub(r"[^a-z0-9_]", lambda match: {".": "p", "-": "m"}.get(match[0], ""), str(value).lower())


@lru_cache(maxsize=1)
def _environment() -> Any:
    # Imported here: a plan is read by commands that print no kernel.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("moec.codegen.kernels", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        line_statement_prefix=None,
        autoescape=False,
    )
