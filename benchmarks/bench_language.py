"""The language: the time of `moec check` by file size, and its messages about planted faults."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from bench_check import one_block, sixty_blocks
from commands import run_moec, run_python
from planted_faults import KINDS, corpus, diagnosed, first_points_at, points_at, restored
from report import Row, median, parser, report

SIXTY_LIMIT_MS = 200
LARGE_LIMIT_MS = 1000
MEMORY_LIMIT_MB = 150
LAYER = """  layers {number} {{
    attention = gqa(heads = 32, kv_heads = 8, head_dim = {width}, rope = rope(theta = 1e6))
    moe {{
      # experts of layer {number}
      experts = experts * swiglu(14_336)
      gate    = topk(2, normalize = true)
      balance = [switch_loss(0.02), z_loss(1e-3)]
    }}
  }}
"""
LINES_OF_A_LAYER = LAYER.count("\n")


def long_file(lines: int) -> str:
    """A file of about `lines` lines: as many layers as that takes, each in a block of its own and unlike the others."""
    depth = (lines - 10) // LINES_OF_A_LAYER
    layers = "".join(LAYER.format(number=number, width=64 + 2 * (number % 500)) for number in range(depth))
    head = (
        f'use "clusters/dgx_h100"\nlet experts = 64\nmodel "long" {{\n  vocab = 32_000; dim = 4096; depth = {depth}\n'
    )
    return f"{head}{layers}}}\ntrain {{ batch = 1024; sequence = 4096 }}\nparallel {{ ep = 8 }}\n"


def speed(repeat: int) -> list[Row]:
    """Wall time and memory of the whole command, from the interpreter's start to its exit."""
    bare = [run_python("-c", "pass").seconds for _ in range(repeat)]
    rows = [Row("python, doing nothing", 1e3 * median(bare), "ms")]
    files = [
        ("60 layers, one block", one_block(), SIXTY_LIMIT_MS),
        ("60 layers, sixty blocks", sixty_blocks(), SIXTY_LIMIT_MS),
        *((f"{lines:,} lines", long_file(lines), None) for lines in (1250, 2500, 5000)),
        ("10,000 lines", long_file(10_000), LARGE_LIMIT_MS),
        ("20,000 lines", long_file(20_000), None),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, text, limit in files:
            file = Path(folder, "file.moe")
            file.write_text(text)
            ran = [run_moec("check", str(file)) for _ in range(repeat)]
            rows.append(Row(f"moec check, {name}, median", 1e3 * median([one.seconds for one in ran]), "ms", limit))
            memory = max(one.peak_bytes for one in ran) / 1e6
            rows.append(Row(f"moec check, {name}, memory", memory, "MB", MEMORY_LIMIT_MB if limit else None))
    return rows


def messages(seed: str) -> list[Row]:
    """Shares of the planted faults, in percent."""
    count: Counter[tuple[str, str]] = Counter()
    for fault in corpus(seed):
        found = diagnosed(fault.text)
        for kind in (fault.kind, "all"):
            count[kind, "planted"] += 1
            count[kind, "diagnosed"] += bool(found)
            count[kind, "primary"] += first_points_at(fault, found)
            count[kind, "any"] += points_at(fault, found)
            count[kind, "restored"] += restored(fault, found)
    rows = []
    for kind in ("all", *KINDS):
        planted = count[kind, "planted"]
        rows.append(Row(f"{kind}: planted", planted))
        for what, key in (("diagnosed", "diagnosed"), ("error on the line", "primary"), ("or a label", "any")):
            rows.append(Row(f"{kind}: {what}", 100 * count[kind, key] / planted, "%"))
    share = 100 * count["misspelt", "restored"] / count["misspelt", "planted"]
    return [*rows, Row("misspelt: the suggestion restores it", share, "%")]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=7)
    options.add_argument("--seed", default="", help="of the planted faults; the tests use the default")
    chosen = options.parse_args()
    report("planted faults", messages(chosen.seed), None)
    report("moec check", speed(chosen.repeat), chosen.json)


if __name__ == "__main__":
    main()
