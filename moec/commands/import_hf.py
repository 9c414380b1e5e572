"""`moec import hf`: a model of Hugging Face as a `.moe` file."""

from __future__ import annotations

import os
from pathlib import Path

from moec.commands.check import show
from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.huggingface.read import Imported, read_config
from moec.grammar.printer import model_text

REST = """\
# The hardware, to be replaced by yours: `use "clusters/dgx_h100"` and `cluster "mine" { from = dgx_h100; nodes = 4 }`.
cluster "here" {
  device = cpu
  level "process" { size = 1 }
}

# How it is trained. A balance term, such as `balance = [switch_loss(0.01)]` in `moe`, keeps the experts equally busy.
train {
  batch     = 8  # sequences per step, over all ranks
  sequence  = %d
  optimizer = adamw(lr = 1e-5)
}
"""


def run(source: Path, output: Path | None, style: str) -> None:
    """Writes or prints the file; warnings go to stderr. Never overwrites a file."""
    imported = read_config(source)
    show(imported.notes, style)
    text = moe_text(imported, source)
    if output is None:
        print(text, end="")
        return
    fresh = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        try:
            os.link(fresh, output)
        finally:
            fresh.unlink()
    except FileExistsError:
        message = f"{output} is unchanged"
        raise DiagnosticError([diagnose("MOE0013", None, message, help="choose another name")]) from None
    except OSError as error:
        raise DiagnosticError([diagnose("MOE0014", None, f"{output}: {error.strerror}")]) from error
    print(f"wrote {output}; next: `moec check {output}`, name your cluster in it, then `moec compile {output}`")


def moe_text(imported: Imported, source: Path) -> str:
    """The whole file: the model, and a cluster and a training to be replaced."""
    name = source.parent.name if source.name == "config.json" and source.parent.name else source.name
    context = imported.spec.model.context or 4096
    first = f"# {name}, imported from its config.json; the weights: `moec.load_hf(module, DIR)`.\n"
    return f"{first}{model_text(imported.spec)}\n{REST % min(context, 4096)}"
