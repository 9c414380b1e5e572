"""Recognises quantised tensors by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from moec.grammar.diagnostics import Diagnostic, diagnose
from moec.grammar.huggingface.quantised import READS, way_out
from moec.runtime.huggingface.source_tensors import SourceTensor

NAMES = {
    "mxfp4": re.compile(r".*_proj_blocks"),
    "GPTQ or AWQ": re.compile(r".*\.qweight"),
    "fp8": re.compile(r".*\.weight_scale(_inv)?"),
    "bitsandbytes": re.compile(r".*\.weight\.(absmax|quant_map|quant_state\..*)|.*\.SCB"),
}
"""Names that only tensors of quantised checkpoints have."""


def quantised(stored: Mapping[str, SourceTensor], name: str) -> Diagnostic | None:
    """MOE0907 if the tensors of the source `name` are quantised, else None."""
    for method, pattern in NAMES.items():
        tensor = next(filter(pattern.fullmatch, stored), None)
        if tensor is not None:
            message = f"the weights of {name} are quantised ({method}): it has {tensor}, and {READS}"
            return diagnose("MOE0907", None, message, help=way_out(method, name if Path(name).is_dir() else "DIR"))
    return None
