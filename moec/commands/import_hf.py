"""`moec import hf`: a model of Hugging Face as a `.moe` file."""

from __future__ import annotations

from pathlib import Path

from moec.commands.console.documents import WrittenFile
from moec.commands.console.new_file import write_new
from moec.commands.console.output import print_json, show
from moec.grammar.huggingface.read import CONFIG, Imported, read_config
from moec.grammar.printer import model_text

SEQUENCE = 4096
"""Tokens of a sequence in the file, if the model's context is longer."""
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
    if output is not None:
        write_new(output, text)
    commands = [f"moec check {output}", f"moec compile {output}"] if output else []
    if style == "json":
        print_json(WrittenFile(file=str(output) if output else None, text=text, next=commands))
    elif output is None:
        print(text, end="")
    else:
        print(f"wrote {output}; next: name your cluster in {output}, then `{commands[0]}` and `{commands[1]}`")


def moe_text(imported: Imported, source: Path) -> str:
    """The whole file: the model, and a cluster and a training to be replaced."""
    name = source.parent.name if source.name == CONFIG and source.parent.name else source.name
    comment = f"# {name}, imported from its config.json; the weights: `moec.load_hf(module, DIR)`.\n"
    return f"{comment}{model_text(imported.spec)}\n{REST % min(imported.spec.model.context or SEQUENCE, SEQUENCE)}"
