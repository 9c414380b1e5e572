"""`moec check` on 60-layer files: the whole command, from the interpreter's start to its exit, and without torch."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from commands import run_moec, run_python
from report import Row, median, parser, report

LIMIT_MS = 300
LAYER = """
  layers %s {
    attention = gqa(heads = 32, kv_heads = 8, head_dim = %d, rope = rope(theta = 1e6))
    moe {
      experts = %d * swiglu(14_336)
      gate    = topk(2, normalize = true)
      balance = [switch_loss(0.02), z_loss(1e-3)]
    }
  }"""
FILE = """
use "clusters/dgx_h100"
let vocab = 32_000
model "sixty" {
  vocab = vocab; dim = 4096; context = 32_768; depth = 60%s
}
cluster "four_nodes" { from = dgx_h100; nodes = 4 }
train { batch = 1024; sequence = 4096; optimizer = adamw(lr = 3e-4); routing = zipf(1.1) }
parallel { ep = 8 }
"""


def one_block() -> str:
    """Sixty equal layers."""
    return FILE % (LAYER % ("", 128, 64))


def sixty_blocks() -> str:
    """Sixty layers, each in a separate block and different from its neighbours: the worst case."""
    return FILE % "".join(LAYER % (number, 64 + 2 * number, 8 * (1 + number)) for number in range(60))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=15)
    chosen = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bare = [run_python("-c", "pass").seconds for _ in range(chosen.repeat)]
        rows.append(Row("python, doing nothing", 1e3 * median(bare), "ms"))
        for name, text in (("one block", one_block()), ("sixty blocks", sixty_blocks())):
            file = Path(folder, "sixty.moe")
            file.write_text(text)
            runs = [run_moec("check", str(file)) for _ in range(chosen.repeat)]
            seconds = [run.seconds for run in runs]
            rows.append(Row(f"moec check, {name}, median", 1e3 * median(seconds), "ms", LIMIT_MS))
            rows.append(Row(f"moec check, {name}, fastest", 1e3 * min(seconds), "ms", LIMIT_MS))
            rows.append(Row("  of the processor, median", 1e3 * median([run.cpu_seconds for run in runs]), "ms"))
        modules = imported(file)
    rows.append(Row("modules imported", len(modules)))
    rows.append(Row("of torch's among them", sum(module.split(".")[0] == "torch" for module in modules)))
    report("moec check, 60 layers", rows, chosen.json)


def imported(file: Path) -> list[str]:
    """Every module that the command imports, as the interpreter itself reports it."""
    output = run_moec("check", str(file), python=("-X", "importtime")).output
    return re.findall(r"^import time:[\d |]+\| *(\S+)$", output, re.MULTILINE)


if __name__ == "__main__":
    main()
