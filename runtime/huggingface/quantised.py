"""Whether stored tensors are quantised, by their names and dtypes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from moec.grammar.diagnostics import Diagnostic, diagnose
from moec.grammar.huggingface.quantised import READS, way_out
from moec.runtime.huggingface.stored import Stored

NAMES = {
    "mxfp4": re.compile(r".*_proj_blocks"),
    "GPTQ or AWQ": re.compile(r".*\.qweight"),
    "fp8": re.compile(r".*\.weight_scale(_inv)?"),
    "bitsandbytes": re.compile(r".*\.weight\.(absmax|quant_map|quant_state\..*)|.*\.SCB"),
}
"""Tensors that quantised checkpoints alone have."""


def quantised(stored: Mapping[str, Stored], name: str) -> Diagnostic | None:
    """MOE0907 where the tensors of `name` are quantised."""
    for method, pattern in NAMES.items():
        found = next(filter(pattern.fullmatch, stored), None)
        if found is not None:
            message = f"the weights of {name} are quantised ({method}): it has {found}, and {READS}"
            return diagnose("MOE0907", None, message, help=way_out(method, name if Path(name).is_dir() else "DIR"))
    return None
