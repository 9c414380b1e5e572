"""The models and clusters of published rows, as `.moe` text: those of the library, and what it lacks."""

from __future__ import annotations

import re
from pathlib import Path

import moec.grammar

LIBRARY = Path(moec.grammar.__file__).with_name("library")

SHORTENED = {
    "deepseek-v2-4-layers": ("deepseek_v2", 4, "layers 0 {"),
    "deepseek-v3-4-layers": ("deepseek_v3", 4, "layers 0 {"),
}
"""A library model with another depth; of DeepSeek's first layers one is dense in both."""

WRITTEN = {
    # arXiv 2505.11432. The number of kv heads is a guess: as many as heads come nearest to 352 B parameters.
    "internal-352b": """model "internal_352b" {
  vocab = 65_536; dim = 4096; depth = 60; context = 8192; dtype = bf16
  layers {
    attention = gqa(heads = 32, kv_heads = 32, rope = rope(theta = 1e6))
    moe { experts = 32 * swiglu(14_336); gate = topk(3, normalize = true); balance = [switch_loss(0.001)] }
  }
}
""",
}

CLUSTERS = {
    "h100": ("dgx_h100", 8, ""),
    # H800: an H100 with NVLink at 400 GB/s in both directions together.
    "h800": ("dgx_h100", 8, 'level "node" { size = 8; bandwidth = 200GB/s }'),
    "h200": ("dgx_h200", 8, ""),
    "b200": ("dgx_b200", 8, ""),
    # B300 stands for a B200: dense bf16 and NVLink are the same, its memory is 4 % faster.
    "b300": ("dgx_b200", 8, ""),
    # Published runs take 64 of a rack's 72 ranks.
    "gb200": ("gb200_nvl72", 64, 'level "rack" { size = 64 }'),
    "gb300": ("gb300_nvl72", 64, 'level "rack" { size = 64 }'),
}
"""The library's cluster of a device, the ranks of its innermost level, and what is stated otherwise."""


def model_text(name: str, sequence: int) -> str | None:
    """The model with a context of at least `sequence`; None where moec has none of this name."""
    if name in WRITTEN:
        return WRITTEN[name]
    base, depth, dense = SHORTENED.get(name, (re.sub("[-.]", "_", name), None, ""))
    file = LIBRARY / "models" / f"{base}.moe"
    if not file.exists():
        return None
    text = file.read_text()
    if depth:
        text = re.sub(r"depth( *)= \d+", rf"depth\1= {depth}", text)
        text = re.sub(r"layers 0(\.\.\d+)? \{", dense, text)
    context = int(re.findall(r"context *= ([\d_]+)", text)[0].replace("_", ""))
    return re.sub(r"(context *=) [\d_]+", rf"\1 {max(context, sequence)}", text)


def depth_of(text: str) -> int:
    return int(re.findall(r"depth *= (\d+)", text)[0])


def cluster_text(device: str, gpus: int) -> str | None:
    """`gpus` ranks of the device; None of a device that the library has no cluster of."""
    if device not in CLUSTERS:
        return None
    base, inside, stated = CLUSTERS[device]
    if gpus < inside:
        name = "rack" if inside == 64 else "node"
        stated = f'level "{name}" {{ size = {gpus} }}'
    lines = [f"from = {base}", f"nodes = {-(-gpus // inside)}", *filter(None, [stated])]
    return f'use "clusters/{base}"\ncluster "published" {{ {"; ".join(lines)} }}\n'
