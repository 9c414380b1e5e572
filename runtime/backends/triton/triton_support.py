"""Whether the rendered kernels can run here."""

from __future__ import annotations

import importlib.util
import os
import re

import numpy as np
import torch


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton that the kernels are tried with."""

TRITONS = f"Triton {_dotted(OLDEST)} to {_dotted(NEWEST)}"

OLDEST_CAPABILITY = (8, 0)
"""Before it, no bf16 matrix product (NVIDIA, compute capability)."""


def triton_complaint() -> str | None:
    """Why the kernels cannot be compiled at all, in one line; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if not OLDEST <= _version(triton.__version__) <= NEWEST:
        return f"the kernels need {TRITONS}, and {triton.__version__} is installed"
    return None


def complaint(device: str) -> str | None:
    """Why the kernels cannot run on a kind of device, in one line; None where they can."""
    reason = triton_complaint()
    if reason is not None:
        return reason
    import triton

    if device == "cpu" and not interpreting():
        return "on CPU tensors Triton needs its interpreter, TRITON_INTERPRET=1"
    if device == "cpu" and _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        return f"the interpreter of Triton {triton.__version__} does not work with NumPy 2.4 or newer"
    if device == "cuda" and torch.cuda.is_available() and torch.version.hip is None:
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST_CAPABILITY:
            have, need = _dotted(capability), _dotted(OLDEST_CAPABILITY)
            return f"the kernels need compute capability {need}, {torch.cuda.get_device_name()} has {have}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text)[:2])


def interpreting() -> bool:
    """Whether kernels run on CPU tensors, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")
