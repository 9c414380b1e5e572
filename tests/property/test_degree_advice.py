"""Files with wrong degrees: what the help of an error advises removes that error and makes no new one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from moec.grammar import load_text
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.passes.degrees.degrees import choose_degrees

DEGREES = st.integers(1, 12)
ADVICE = re.compile(r"`(\w+) = (\d+)( \* …)?`")


@dataclass
class File:
    """A file of three layers: dense, and two mixtures with degrees of their own."""

    ranks: int
    heads: int
    kv_heads: int
    hidden: int
    shared: int
    experts: tuple[int, int]
    kinds: tuple[str, str]
    attention: str
    dense: dict[str, object] = field(default_factory=dict)
    layers: tuple[dict[str, int | None], ...] = ()
    train: dict[str, int] = field(default_factory=dict)
    context: int = 64

    def text(self) -> str:
        """The file: every number of its own stands on a line of its own."""
        degrees = [f"{name} = {value}" for name, value in self.dense.items() if value is not None]
        for n, words in enumerate(self.layers, 1):
            degrees += [f"layers {n} {{", *(f"{w} = {value}" for w, value in words.items() if value is not None), "}"]
        mixtures = [
            f"layers {n} {{ moe {{ experts = {count} * {kind}; gate = topk(1, score = sigmoid);"
            f" shared = gelu({self.shared}) }} }}"
            for n, (count, kind) in enumerate(zip(self.experts, self.kinds, strict=True), 1)
            if count
        ]
        train = "; ".join(f"{name} = {value}" for name, value in self.train.items())
        lines = [
            f'model "m" {{ vocab = 32; dim = {self.heads * 4}; depth = 3; context = {self.context}',
            f"layers {{ attention = {self.attention}; ffn = gelu({self.hidden}) }}",
            *mixtures,
            "}",
            f'cluster "c" {{ device = cpu; level "node" {{ size = {self.ranks} }} }}',
            "parallel {",
            *degrees,
            "}",
            f"train {{ {train} }}",
        ]
        return "\n".join(lines)


@st.composite
def files(draw: st.DrawFn) -> File:
    """Any file whose model is right."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4]))
    norm = draw(st.sampled_from(["none", "projection"]))
    maybe, kinds = st.none() | DEGREES, st.sampled_from(["gelu(6)", "gelu(8)", "swiglu(12)", "lora(5)"])
    dense = {name: draw(maybe) for name in ("dp", "tp", "cp", "ep", "etp", "microbatches")}
    dense["sequence_parallel"] = draw(st.sampled_from([None, "false"]))
    return File(
        ranks=draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16])),
        heads=heads,
        kv_heads=kv_heads,
        hidden=draw(st.sampled_from([4, 6, 8, 12, 30])),
        shared=draw(st.sampled_from([4, 6, 8, 12])),
        experts=(draw(st.sampled_from([0, 4, 6, 8])), draw(st.sampled_from([0, 3, 8, 60]))),
        kinds=(draw(kinds), draw(kinds)),
        attention=f"gqa(heads = {heads}, kv_heads = {kv_heads}, head_dim = 4, qk_norm = {norm})",
        dense=dense,
        layers=tuple({word: draw(maybe) for word in ("ep", "etp")} for _ in range(2)),
        train={"batch": draw(st.integers(1, 48)), "sequence": draw(st.sampled_from([1, 7, 8, 12, 63, 64]))},
    )


def errors(text: str) -> list[Diagnostic]:
    """The errors of a file, of its degrees included."""
    loaded = load_text(text)
    if loaded.spec is None:
        return list(loaded.diagnostics)
    try:
        choose_degrees(loaded.spec)
    except DiagnosticError as error:
        return list(error.diagnostics)
    return []


Edit = tuple[int, int, str]


def edits_of(text: str, error: Diagnostic, way: int = 0) -> set[Edit]:
    """The edits of the first (0) or the other (1) way out that the help of `error` names."""
    help = error.help.split(", or leave")[0]
    ways = help.removeprefix("set ").split(" or ")
    found = ADVICE.findall(ways[way] if way < len(ways) else "")
    edits: set[Edit] = set()
    for name, value, of_experts in found:
        if name in ("ep", "etp"):
            span = error.span
        elif of_experts or name in ("heads", "kv_heads", "hidden"):
            span = error.labels[0].span
        else:
            (match,) = re.finditer(rf"\b{name} = (\d+)", text)
            edits.add((match.start(1), match.end(1), value))
            continue
        assert span is not None
        end = span.start + len(re.match(r"\d+", text[span.start :])[0])  # type: ignore[index]
        edits.add((span.start, end, value))
    return edits


def edited(text: str, edits: set[Edit]) -> str:
    """The file after all these edits."""
    for start, end, value in sorted(edits, reverse=True):
        text = text[:start] + value + text[end:]
    return text


def marks(found: list[Diagnostic]) -> set[tuple[object, ...]]:
    """The code of each error and the lines that it points at, which no edit moves."""
    return {
        (error.code, *(at.line for at in (error.span, *(label.span for label in error.labels)) if at))
        for error in found
    }


@examples(80, 400)
@given(files())
def test_following_the_help_of_an_error_removes_it_and_makes_no_new_one(file: File) -> None:
    text = file.text()
    found = errors(text)
    for error in found:
        assert error.code[:5] == "MOE03", error
        for way in (0, 1):
            after = edited(text, edits_of(text, error, way))
            if way == 0:
                assert after != text, error.help
            elif after == text:
                continue
            left = marks(errors(after))
            assert not marks([error]) & left, (text, error.help, left)
            assert not left - marks(found), (text, error.help, left)


@examples(80, 400)
@given(files())
def test_following_the_help_of_every_error_leaves_none(file: File) -> None:
    text = file.text()
    edits: set[Edit] = set()
    for error in errors(text):
        edits |= edits_of(text, error)
    after = edited(text, edits)
    assert errors(after) == [], (text, after)


@examples(80, 300)
@given(files())
def test_errors_of_one_file_advise_one_value_for_each_degree(file: File) -> None:
    text = file.text()
    advised: dict[tuple[str, object], set[str]] = {}
    for error in errors(text):
        for name, value, _ in ADVICE.findall(error.help.split(" or ")[0]):
            place = error.span if name in ("ep", "etp") else None
            advised.setdefault((name, place), set()).add(value)
    assert all(len(values) == 1 for values in advised.values()), advised
