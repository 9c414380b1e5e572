"""Quantised weights: the names of methods, and how to get weights that moec reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READS = "moec reads weights in fp32, bf16 and fp16"
CLASSES = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Classes of transformers whose `dequantize` gives back bf16 weights, by `quant_method`."""
COMMAND = (
    'python -c "from transformers import AutoModelForCausalLM as M, {1} as Q; '
    "M.from_pretrained('{0}', quantization_config=Q(dequantize=True), dtype='bfloat16')"
    ".save_pretrained('{0}-bf16', save_original_format=False)\""
)


def method_of(config: Any) -> str:
    """The `quant_method` of a `quantization_config`."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    return method if isinstance(method, str) else "a method without a name"


def way_out(method: str, folder: str = "DIR") -> str:
    """How to get weights that moec reads."""
    if method in CLASSES:
        return f"dequantise them with {COMMAND.format(folder, CLASSES[method])}"
    return "download the model's weights in bf16 instead, of which these were made"
