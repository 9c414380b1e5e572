"""Looks up a name of another system: what it means in each system that has it, in words for messages and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from moec.grammar.foreign import deepspeed, fastmoe, huggingface, megatron, shared, torchtitan, tutel
from moec.grammar.foreign.row import SYSTEMS, Row
from moec.grammar.foreign.values import IN_BLOCKS, NEAR, OURS, WORDS
from moec.grammar.foreign.words import sentence
from moec.grammar.spec.optimizers import OPTIMIZERS

TABLES = {
    "mg": megatron.ROWS,
    "ds": deepspeed.ROWS,
    "hf": huggingface.ROWS,
    "tu": tutel.ROWS,
    "tt": torchtitan.ROWS,
    "fm": fastmoe.ROWS,
}
"""The rows of each system's own file."""
CALLS = ("gqa",)
"""Words of paths that are calls; all others are blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The meaning of a name in some systems, by a row of the table.

    `systems` are the keys of the systems; `read` says where the meaning was read in each system.
    """

    word: str
    systems: tuple[str, ...]
    row: Row
    read: Mapping[str, str]

    @property
    def path(self) -> tuple[str, ...]:
        """The way to the word here: `("model", "dim")`; empty if there is none."""
        return tuple(self.row.path.split(".")) if self.row.path else ()

    @property
    def name(self) -> str:
        """moec's word; empty if there is none."""
        return self.path[-1] if self.path else ""

    @property
    def head(self) -> str:
        """The name that an assignment of the form gives: `attention` of `attention = mha(heads = {})`."""
        head, equals, _ = self.row.form.partition(" = ")
        return head if equals and head.isidentifier() else ""

    @property
    def plain(self) -> bool:
        """Whether moec's word takes the same value, so that only the name changes."""
        return self.row.form == f"{self.name} = {{}}"

    @property
    def block(self) -> str:
        """The place of the form in words: "the `moe` block of `layers`" for `model { layers { moe } }`."""
        first = self.row.form.partition(" ")[0]
        blocks = self.path[: self.path.index(first)] if first in self.path else self.path[:-1]
        if not blocks:
            return ""
        inner = f"`{blocks[-1]}(…)`" if blocks[-1] in CALLS else f"the `{blocks[-1]}` block"
        return f"{inner} of `{blocks[-2]}`" if len(blocks) > 1 else inner

    @property
    def named(self) -> str:
        """The systems that use the name so: "Megatron and DeepSpeed"."""
        return listed([SYSTEMS[key].name for key in self.systems])

    def written(self, value: str = "") -> str:
        """The form with `value`, or with an example of one."""
        return self.row.form.replace("{}", value or self.row.example)

    def cases(self, value: str = "") -> list[tuple[str, str]]:
        """Each other setting of the system, with its form."""
        return [(when, form.replace("{}", value or self.row.example)) for when, form in self.row.cases]

    def forms(self) -> list[str]:
        """All forms of the row."""
        return [*([self.written()] if self.row.form else []), *(form for _, form in self.cases())]

    def said(self, value: str = "", *, here: bool = False, brief: bool = False) -> str:
        """A sentence for help and pages. `here`: the reader is in the block to which the form belongs.

        With the `value` of a file the form's other numbers are blanks, because they are in the file too. `brief` omits
        the note.
        """
        if value.lower() in self.row.but:
            return self.row.but[value.lower()]
        place = "" if here or not self.block else f", in {self.block}"
        row = self.row._replace(note="") if brief and self.path else self.row
        return sentence(row, value, place, plain=self.name if self.plain else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A name of other systems, with its meanings: one for each set of systems in which it means the same."""

    word: str
    meanings: tuple[Meaning, ...]

    @property
    def one(self) -> Meaning | None:
        """The meaning, where the name means the same in every system that has it."""
        return self.meanings[0] if len(self.meanings) == 1 else None

    @property
    def heads(self) -> set[str]:
        """The names here that an assignment of some form gives."""
        return {meaning.head or meaning.name for meaning in self.meanings if meaning.path}

    @property
    def systems(self) -> tuple[str, ...]:
        """The names of the systems that have the name."""
        return tuple(SYSTEMS[key].name for meaning in self.meanings for key in meaning.systems)

    def said(self, value: str = "", *, here: bool = False) -> str:
        """What each system's is here, as `Meaning.said` has it; without notes where systems differ."""
        if self.one is not None:
            return self.one.said(value, here=here)
        said = [(meaning.named, meaning.said(value, here=here, brief=True)) for meaning in self.meanings]
        if len({text for _, text in said}) == 1:
            notes = (f"; {meaning.named}: {meaning.row.note}" for meaning in self.meanings if meaning.row.note)
            return said[0][1] + "".join(notes)
        texts = ". ".join(f"{named}: {text}" for named, text in said)
        return f"systems differ. {texts}. `moec explain {self.word}` says more"

    @property
    def renames(self) -> bool:
        """Whether the word here takes the same value in every system that has the name, inside of the word's call."""
        return all(meaning.path and meaning.row.renames and not meaning.row.differs for meaning in self.meanings)

    @property
    def plain(self) -> bool:
        """Whether the name has only another word here, in every system that has it."""
        return self.renames and all(meaning.plain for meaning in self.meanings)


def _rows() -> Iterator[tuple[str, tuple[str, ...], Row]]:
    """Each name as it is written in the table, with the keys of its systems, and its row."""
    for row in shared.ROWS:
        for name in row.names.split():
            word, _, keys = name.partition(":")
            yield word, tuple(keys.split(",")), row
    for key, rows in TABLES.items():
        for row in rows:
            yield from ((name, (key,), row) for name in row.names.split())


def _sense(row: Row) -> tuple[object, ...]:
    """The contents by which two rows are equal."""
    return (
        *(row.path, row.form, row.when, row.cases, row.differs, row.note, row.convert, row.renames),
        *row.but.items(),
    )


def key_of(name: str) -> str:
    """A name without a flag's dashes, in lower case."""
    return name.lstrip("-").replace("-", "_").lower()


@cache
def aliases() -> dict[str, Alias]:
    """Every alias by its word. Equal rows are one meaning."""
    meanings_by_word: dict[str, dict[tuple[object, ...], Meaning]] = {}
    for name, keys, row in _rows():
        word = key_of(name)
        meanings = meanings_by_word.setdefault(word, {})
        same = _sense(row)
        before = meanings.get(same) or Meaning(word=word, systems=(), row=row, read={})
        read = {**before.read, **dict.fromkeys(keys, row.read)}
        meanings[same] = replace(before, systems=(*before.systems, *keys), read=read)
    return {word: Alias(word=word, meanings=tuple(meanings.values())) for word, meanings in meanings_by_word.items()}


def alias(word: str, block: str = "") -> Alias | None:
    """The alias of other systems' `word`; a flag's dashes and capitals are ignored.

    `block`: the block with the word. Some words of this language are aliases in a block that does not have them; all
    others are not.
    """
    word = key_of(word)
    word = IN_BLOCKS.get((block, word), word)
    return None if word in OURS else aliases().get(word)


def elsewhere(word: str) -> Alias | None:
    """The alias of other systems' `word`, even if it is a word of this language too."""
    return aliases().get(key_of(word))


def synonym(word: str) -> str | None:
    """The word here for a value of other systems: `bf16` for `bfloat16`."""
    return WORDS.get(word) or WORDS.get(word.lower().replace("-", "_"))


def defaults_elsewhere(word: str, arguments: Iterable[str] = ()) -> str:
    """The other defaults that the optimizer `word` has in other systems; empty if `arguments` has all that differ."""
    kind = OPTIMIZERS.get(word)
    return "" if kind is None or kind.differ.issubset(arguments) else kind.elsewhere


_BEST = re.compile(r"top[_-]?([1-9])")


def near(word: str) -> str | None:
    """A help for a value of other systems that has no equal word, or several; None for other values."""
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


def listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
