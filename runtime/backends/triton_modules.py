"""Rendered kernels as Python modules.

What is executed is the text that this moec's own templates give for a shape, and nothing else: no plan, file or cache
on a disk is read. Triton asks for a kernel's source through `inspect`, which asks the module's loader.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib.abc import InspectLoader
from types import ModuleType

from moec.codegen.kernels import KernelShape, render

PACKAGE = "moec.runtime.backends.rendered"
"""What the modules are called in tracebacks and profiles: this and the shape's name."""


class _Rendered(InspectLoader):
    """Loads the module of one shape."""

    def __init__(self, shape: KernelShape) -> None:
        self.text = render(shape)

    def get_source(self, fullname: str) -> str:
        return self.text


@cache
def module_of(shape: KernelShape) -> ModuleType:
    """The module with a shape's kernels, as `triton.jit` gives them. Raises `ValueError` as `render` does."""
    name = f"{PACKAGE}.{shape.name}"
    spec = importlib.util.spec_from_loader(name, _Rendered(shape), origin=f"<{shape.name}>")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = f"<{shape.name}>"
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
