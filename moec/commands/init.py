"""`moec init`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from moec.commands.console.documents import WrittenFile
from moec.commands.console.new_file import write_new
from moec.commands.console.output import emit
from moec.grammar.diagnostics import DiagnosticError, diagnose

STARTER = """\
# A Mixture-of-Experts language model and its cluster. Check it with `moec check`, compile it with `moec compile`.
# `moec explain topk` explains a word. The whole language: docs/language.md.

let experts = 8  # a constant; `--let experts=16` overrides it

model "starter" {
  vocab   = 256   # number of token ids
  dim     = 128   # width of the residual stream
  depth   = 4     # layers
  context = 256   # longest sequence
  dtype   = fp32  # of computation; parameters that train stay fp32. bf16 on a GPU

  # Every layer: attention, then a mixture of experts.
  layers {
    attention = gqa(heads = 4, kv_heads = 2, rope = rope())
    moe {
      experts = experts * swiglu(256)      # this many feed-forwards, each 256 wide
      gate    = topk(2, normalize = true)  # each token goes to its two best experts
      balance = [switch_loss(0.01)]        # keeps the experts equally busy
    }
  }

  # A later block overrides earlier ones: the first layer is dense.
  layers 0 { ffn = swiglu(512) }
}

# The hardware: levels from the innermost out, such as the GPUs of a node, then the nodes.
# The library has real machines: `use "clusters/dgx_h100"` and `cluster "mine" { from = dgx_h100; nodes = 4 }`.
cluster "here" {
  device = cpu
  level "process" { size = 4 }
}

train {
  batch     = 32  # sequences per step, over all ranks
  sequence  = 128
  optimizer = adamw(lr = 1e-3)
}

# Degrees that are left out are filled in.
parallel {
  ep = 4  # each of 4 ranks holds a quarter of the experts
}
"""


def run(file: Path | None, model: str | None = None, style: str = "full") -> None:
    """Writes a commented starter file, or one that starts from the library's `model`; never overwrites a file.

    The file's default name is `model.moe`, or the library model's.
    """
    text = STARTER
    if model is None and file is not None and not file.suffix:
        _require_no_model(file)
    if model is not None:
        from moec.commands.library import starter_from

        text = starter_from(model)
    if file is None:
        file = Path(f"{model.rpartition('/')[2]}.moe" if model else "model.moe")
    write_new(file, text)
    commands = [f"moec check {file}", f"moec compile {file}"]
    emit(
        style,
        lambda: [f"wrote {file}; next: `{commands[0]}`, then `{commands[1]}`"],
        lambda: WrittenFile(file=str(file), text=text, next=commands),
    )


def _require_no_model(file: Path) -> None:
    """Raises `DiagnosticError` MOE0017 for a file with the name of a model: `--from` is missing."""
    from moec.commands.library import near_models

    if near := near_models(file.name):
        message = f"`{file.name}` is a model of the library, and this would write the starter file"
        if file.name not in near:
            message = f"`{file.name}` is like a model of the library, and this would write the starter file"
        help = f"`moec init --from {near[0]}` writes {near[0]}.moe, `moec init {quote(file.name)}.moe` the starter file"
        raise DiagnosticError([diagnose("MOE0017", None, message, help=help)])
