"""Rendered kernels as Python modules.

Only text that this moec's templates render for a shape is executed; no plan, file or cache on disk is read. Triton gets
a kernel's source through `inspect`, which calls the module's loader.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Collection, Iterator
from functools import cache
from importlib.abc import InspectLoader
from types import CodeType, ModuleType
from typing import Any

from moec.codegen.kernels.kernel_shape import KernelShape, render

PACKAGE = "moec.runtime.backends.rendered"
"""The prefix of the modules' names in tracebacks and profiles, before the shape's name."""


class _Rendered(InspectLoader):
    """Loads the module of one shape."""

    def __init__(self, shape: KernelShape) -> None:
        self.text = render(shape)
        self.path = f"<moec>/{shape.name}.py"  # on no disk; profiles and tracebacks show it

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
        return self.source_to_code(self.text, self.path)


@cache
def module_of(shape: KernelShape) -> ModuleType:
    """The module with a shape's kernels, as `triton.jit` gives them. Raises `ValueError` as `render` does."""
    name, loader = f"{PACKAGE}.{shape.name}", _Rendered(shape)
    spec = importlib.util.spec_from_loader(name, loader, origin=loader.path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def kernels_in(shape: KernelShape, only: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """The names of a shape's kernels and their functions; of those named in `only`, if it names any."""
    # Imported here: this module is imported where Triton may be missing.
    from triton.runtime.jit import KernelInterface

    for name, function in vars(module_of(shape)).items():
        is_kernel = isinstance(function, KernelInterface) and not name.startswith("_")
        if is_kernel and (not only or name in only):
            yield name, function
