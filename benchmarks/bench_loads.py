"""`moec plan` on a routing trace: loads, memory and the time of a layer under three placements of experts.

Without `--rows FOLDER` or MOEC_PUBLISHED_ROWS, a folder with `routing_trace.npz`, it measures nothing. The model is the
GPT of the trace (SmartMoE, Zhai et al. 2023), 16,384 choices of a rank in four micro-batches, on 16 A100 of two nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_published import FOLDER
from rich.console import Console
from rich.table import Table

from moec.commands.planning.loads import Placing
from moec.commands.planning.plan import run

TRACE = "routing_trace.npz"

MODEL = """
use "clusters/dgx_a100"
model "gpt_moe" {{
  vocab = 50304; dim = 1536; depth = 12; context = 1024; dtype = bf16
  layers {{ attention = mha(heads = 16); moe {{ experts = 32 * gelu(6144); gate = topk(2) }} }}
}}
cluster "two" {{ from = dgx_a100; level "rail" {{ size = 2 }} }}
train {{ batch = 128; sequence = 1024; routing = trace("{trace}") }}
parallel {{ ep = {ep}; zero = 1; microbatches = 4 }}
"""

PLACINGS = [
    Placing(),
    *(Placing("greedy", 0, age) for age in (0, 1, 10)),
    *(Placing("replicate", 16, age) for age in (0, 1, 10)),
]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, metavar="FOLDER", default=os.environ.get(FOLDER))
    folder = options.parse_args().rows
    if folder is None or not (trace := Path(folder, TRACE).resolve()).is_file():
        print(f"nothing to plan: neither --rows nor {FOLDER} names a folder with {TRACE}")
        return
    console = Console(width=None if os.isatty(1) else 150)
    names = ("EP", "placement", "age", "layer p50", "p95", "step p50", "p95", "kept", "layer / even p50", "p95")
    table = Table(
        *names, "copies, s a step", "GB", title="rows of the busiest rank over the mean", title_justify="left"
    )
    found = {ep: list(planned(trace, ep)) for ep in (4, 8, 16)}
    for ep, documents in found.items():
        for placing, document in documents:
            table.add_row(*row(ep, placing, document))
    console.print(table)
    for ep, documents in found.items():
        console.print(f"EP {ep}, {ranking(documents)}", highlight=False)


def planned(trace: Path, ep: int) -> Iterator[tuple[Placing, dict[str, Any]]]:
    """The documents of `moec plan --json`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gpt_moe.moe")
        file.write_text(MODEL.format(trace=trace, ep=ep))
        for placing in PLACINGS:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                run(file, {}, "json", placing=placing)
            yield placing, json.loads(printed.getvalue())


def ranking(documents: list[tuple[Placing, dict[str, Any]]]) -> str:
    """The placements by their steps, p95 with the sums of copies' gradients, from loads a sample old."""
    seconds = {
        name_of(placing): document["loads"]["step_time_p95_s"] + document["loads"]["trace"]["copies_time_s"]
        for placing, document in documents
        if placing.age == 1
    }
    first, *others = sorted(seconds.items(), key=lambda item: item[1])
    slower = ", ".join(f"{name} {of / first[1] - 1:.0%} slower" for name, of in others)
    return f"a step at p95: {first[0]} {first[1]:.2f} s, {slower}"


def name_of(placing: Placing) -> str:
    return f"{placing.extra} copies" if placing.extra else placing.kind


def row(ep: int, placing: Placing, document: dict[str, Any]) -> list[str]:
    load = document["loads"]
    trace, even = load["trace"], load["trace"]["even_layer_time_s"]
    name, age = name_of(placing), "" if placing.is_default else placing.age
    figures = [load["layer_p50"], load["layer_p95"], load["step_time_p50_s"], load["step_time_p95_s"], load["kept"]]
    figures += [trace[f"layer_time_{of}_s"] / even for of in ("p50", "p95")]
    copies = [f"{trace['copies_time_s']:.3f}", f"{trace['copies_gb']:.1f}"] if placing.extra else ["", ""]
    return [str(ep), name, str(age), *(f"{figure:.2f}" for figure in figures), *copies]


if __name__ == "__main__":
    main()
