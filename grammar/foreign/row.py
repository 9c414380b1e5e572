"""A row of the table of other systems' names, and the systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """Names that mean the same in a system, with what is written here.

    `names` are as written there, with a flag's dashes, separated by blanks; in `shared.py` each has `:` and the keys of
    its systems. `path` leads to the word here, `model.dim`; without one there is no such word, and `note` says what
    there is instead. `form` gives the same numbers, with `{}` for the value and `example` for one. `when` says for
    which settings there, and `cases` has the form for others. Where no form gives the same numbers, `differs` says how
    the nearest one differs. `read` is the file and function where that was read, of every row that changes numbers.

    `but` is what to do for some values, in lower case, that the form is not written for. `convert`: the form means the
    same wherever the name may stand. `renames`: inside of the call that has the word, the name can be replaced by it.
    """

    names: str
    path: str
    form: str
    example: str = ""
    note: str = ""
    read: str = ""
    when: str = ""
    cases: tuple[tuple[str, str], ...] = ()
    differs: str = ""
    convert: bool = False
    renames: bool = True
    but: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system whose names the table has. `read_at` is the version or commit that was read."""

    key: str
    name: str
    read_at: str = ""


SYSTEMS = {
    system.key: system
    for system in (
        System(key="hf", name="Hugging Face", read_at="transformers 5.23.0"),
        System(key="mg", name="Megatron", read_at="Megatron-LM d98e8a64 (core 0.20.0)"),
        System(key="ds", name="DeepSpeed", read_at="DeepSpeed edaa7221 (0.19.6)"),
        System(key="tu", name="Tutel", read_at="Tutel ac0e51b9"),
        System(key="fm", name="FastMoE", read_at="FastMoE ee3c561"),
        System(key="tt", name="torchtitan", read_at="torchtitan b5bcd76"),
        System(key="pt", name="PyTorch"),
        System(key="pl", name="Lightning"),
        System(key="ot", name="other libraries"),
    )
}


def off(help: str = "leave it out: that is the default here", **others: str) -> dict[str, str]:
    """What to do where a name is switched off."""
    return {**dict.fromkeys(("false", "0", "0.0", "none", "null"), help), **others}


# Paths of words, and calls that several rows begin with.
ATTENTION = "model.layers.attention"
MLA = f"{ATTENTION}.mla"
GQA = f"{ATTENTION}.gqa"
ROPE = f"{GQA}.rope.rope"
MOE = "model.layers.moe"
GATE = f"{MOE}.gate.topk"
CAPACITY = f"{MOE}.capacity.factor"
SWITCH_LOSS = f"{MOE}.balance.switch_loss.weight"
ADAMW = "train.optimizer.adamw"
GQA_FORM = "attention = gqa(heads = 32, kv_heads = 8, {})"
MLA_FORM = (
    "attention = mla(heads = 128, kv_rank = 512, nope_dim = 128, rope_dim = 64, value_dim = 128, "
    "rope = rope(interleaved = true))"
)
