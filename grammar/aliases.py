"""Names of Hugging Face, Megatron, DeepSpeed, Tutel, FastMoE and torchtitan, and what they are called here.

Imported only where something is wrong or is asked for: a good file is checked without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from moec.grammar.alias_table import IN_BLOCKS, NEAR, ROWS, SYSTEMS, WORDS

CALLS = ("gqa",)
"""Words of paths in whose call a form stands: all others are blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A name of other systems. `path` leads to the word here, `("model", "dim")`, and is empty if there is none.

    `form` is how it is written, with `{}` for the value; `convert` says that the form means the same as the name
    wherever it may stand. `systems` are the names of those that use the word. `but` has what to do for values, in
    lower case, that the form is not written for.
    """

    word: str
    systems: tuple[str, ...]
    path: tuple[str, ...]
    form: str
    example: str
    note: str
    convert: bool
    but: Mapping[str, str]

    @property
    def name(self) -> str:
        """The word here, or nothing."""
        return self.path[-1] if self.path else ""

    @property
    def head(self) -> str:
        """The name that an assignment of `form` gives: `attention` of `attention = mha(heads = {})`."""
        head, equals, _ = self.form.partition(" = ")
        return head if equals and head.isidentifier() else ""

    @property
    def plain(self) -> bool:
        """Whether the word takes the same value, so that nothing but the name changes."""
        return self.form == f"{self.name} = {{}}"

    @property
    def block(self) -> str:
        """Where `form` stands: "the `moe` block of `layers`" for `model { layers { moe } }`."""
        first = self.form.partition(" ")[0]
        blocks = self.path[: self.path.index(first)] if first in self.path else self.path[:-1]
        if not blocks:
            return ""
        inner = f"`{blocks[-1]}(…)`" if blocks[-1] in CALLS else f"the `{blocks[-1]}` block"
        return f"{inner} of `{blocks[-2]}`" if len(blocks) > 1 else inner

    def written(self, value: str = "") -> str:
        """The form with `value`, or with an example of one."""
        return self.form.replace("{}", value or self.example)

    def said(self, value: str = "", *, here: bool = False) -> str:
        """A sentence for help and pages; `here`: it is read in the block to which the form belongs.

        With the `value` of a file the other numbers of the form are blanks: they are the file's too.
        """
        if value.lower() in self.but:
            return self.but[value.lower()]
        if not self.path:
            return self.note.replace("{}", value or self.example or "…")
        place = "" if here or not self.block else f", in {self.block}"
        form = _with_blanks(self.form).replace("{}", value) if value else self.written()
        written = f"`{form}`"
        if self.plain:
            text = f"here it is called `{self.name}`{place}: {written}"
        elif "{}" not in self.form and any(letter.isdigit() for letter in form):
            text = f"here it is written as, for example, {written}{place}"
        else:
            text = f"here it is {written}{place}"
        note = (_with_blanks(self.note) if value else self.note).replace("{}", value or self.example)
        return f"{text}; {note}" if note else text


_SAMPLES = (
    (re.compile(r"(?<=swiglu\()\d[\d_]*"), "WIDTH"),
    (re.compile(r"\b\d+ \* (?=swiglu)"), "COUNT * "),
    (re.compile(r"(?<=\(heads = )\d+"), "HEADS"),
    (re.compile(r"(?<=kv_heads = )\d+"), "KV_HEADS"),
    (re.compile(r"(?<=topk\()\d+"), "K"),
    (re.compile(r"(?<=microbatches = )\d+"), "NUMBER"),
)


def _with_blanks(form: str) -> str:
    """`form` with words for its sample numbers."""
    for sample, blank in _SAMPLES:
        form = sample.sub(blank, form)
    return form


@cache
def aliases() -> dict[str, Alias]:
    """Every alias by its word."""
    found = {}
    for row in ROWS:
        for name in row.names.split():
            word, _, systems = name.partition(":")
            assert word not in found, f"{word} is in the table twice"
            used = tuple(SYSTEMS[system] for system in systems.split(","))
            path = tuple(row.path.split(".")) if row.path else ()
            found[word] = Alias(
                word=word,
                systems=used,
                path=path,
                form=row.form,
                example=row.example,
                note=row.note,
                convert=row.convert,
                but=row.but,
            )
    return found


def alias(word: str, block: str = "") -> Alias | None:
    """What other systems' `word` is here; a flag's dashes and capitals count for nothing.

    `block`: where it stands. Some words of this language mean something else in a block that does not have them.
    """
    word = word.lstrip("-").replace("-", "_").lower()
    return aliases().get(IN_BLOCKS.get((block, word), word))


def synonym(word: str) -> str | None:
    """The word here for a value of other systems: `bf16` for `bfloat16`."""
    return WORDS.get(word) or WORDS.get(word.lower().replace("-", "_"))


_BEST = re.compile(r"top[_-]?([1-9])")


def near(word: str) -> str | None:
    """What to write for a value of other systems that has no equal here, or several; None for others."""
    word = word.lower().replace("-", "_")
    if word in ("top1", "top_1"):
        return "`topk(1)`, or `switch`, weigh the expert by its probability"
    if best := _BEST.fullmatch(word):
        k = best[1]
        return (
            f"write `topk({k}, normalize = true)` if a token's {k} weights add to 1, as in Mixtral and GShard, "
            f"else `topk({k})`"
        )
    return NEAR.get(word)
