"""Statements of Python, of a shell's command line, of YAML and of Markdown: each is one error.

Each becomes one ERROR token: no text of a `.moe` file means the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moec.grammar.foreign.lookup import elsewhere
from moec.grammar.syntax.foreign_blocks import BLOCKS
from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token

Found = tuple[str, str]
"""What is wrong with a statement, and a help."""

_LOOP = "write `layers { … }` for all layers, or `layers 0..3 { … }` for the first four"
_LIST = "equal experts are a product: write `8 * swiglu(WIDTH)`"
_CONDITION = "write `let NAME = …`, whose value `moec compile --let NAME=…` replaces"
_FUNCTION = "a file declares a model, a cluster and how to train: training itself is in a script"
_IMPORT = 'another .moe file is read by `use "clusters/dgx_h100"`'
_PYTHON = {
    **dict.fromkeys(("for", "while"), _LOOP),
    **dict.fromkeys(("if", "elif", "else"), _CONDITION),
    **dict.fromkeys(("def", "class", "return", "with", "print", "assert"), _FUNCTION),
    **dict.fromkeys(("import", "include", "from"), _IMPORT),
}
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:[ \t=]+([^\s;{}-][^\s;{}]*))?")
_MODULES = frozenset(("nn.ModuleList", "torch.nn.ModuleList"))
_ENDS = frozenset(("SEPARATOR", "LBRACE", "RBRACE"))


def foreign_statements(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Names each statement of another language, and puts an ERROR in its place."""
    kept: list[Token] = []
    for begin, end in _statements(tokens):
        part = tokens[begin:end]
        found = _read(notations, part) if len(part) > 1 else None
        if found is None:
            kept += part
            continue
        message, help = found
        first, last = part[0], part[-1]
        notations.add("MOE0109", first.start, last.end, message, help)
        kept.append(Token("ERROR", "", first.start, last.end))
    return kept


def _statements(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """Ranges of indices that cover all tokens: each is a statement, or one separator or brace."""
    begin, depth = 0, 0
    for at, token in enumerate(tokens):
        depth += (token.kind in ("LPAR", "LSQB")) - (token.kind in ("RPAR", "RSQB"))
        if token.kind not in _ENDS or (token.kind == "SEPARATOR" and token.text != ";" and depth > 0):
            continue
        depth = 0
        if begin < at:
            yield begin, at
        yield at, at + 1
        begin = at + 1
    if begin < len(tokens):
        yield begin, len(tokens)


def _read(notations: Notations, part: list[Token]) -> Found | None:
    """What is wrong with the tokens of one statement; None for one of this language, or nothing known."""
    text = notations.source.text
    first, second = part[:2]
    if first.kind == "MINUS" and second.kind == "MINUS":
        return _flag(text[first.start : part[-1].end])
    if first.kind == "MINUS" and second.kind in ("NAME", "STRING", "NUMBER"):
        return (
            "lists have no `-` here",
            "a list is written in brackets: `balance = [switch_loss(0.01), z_loss(1e-3)]`",
        )
    if text.startswith("```", first.start):
        return "this is a mark of Markdown", "leave the line out"
    if first.text in _PYTHON and second.kind != "EQUAL" and not (first.text == "from" and "import" not in _texts(part)):
        return f"the language has no `{first.text}`", _PYTHON[first.text]
    if {"for", "in"} <= _texts(part):
        return "the language has no comprehensions", _product(text[first.start : part[-1].end])
    dotted = _dotted(text, part)
    if dotted is None:
        return None
    name, at, end = dotted
    if at == 0 and part[0].text in BLOCKS and len(part) > end and part[end].kind == "EQUAL":
        inner = name.removeprefix(f"{part[0].text}.").replace(".", " { ")
        value = text[part[end].start : part[-1].end]
        closed = " }" * name.count(".")
        return "settings of a block stand in its braces", f"write `{part[0].text} {{ {inner} {value}{closed}`"
    if name in _MODULES:
        return f"`{name}` is a name of PyTorch", _LIST
    if name == "torch.float16":
        return f"`{name}` is PyTorch's name", "write `bf16`: moec does not train in fp16 yet"
    library = "PyTorch" if name.startswith(("torch.", "nn.")) else "Python"
    return f"`{name}` is a name of {library}", "names have no dots here; `moec explain` lists the words of the language"


def _product(statement: str) -> str:
    """`experts = [swiglu(1024) for _ in range(8)]` as a product."""
    found = re.fullmatch(r"(\w+)\s*=\s*[\w.]*\(?\[(\w+\([^()]*\)) for \w+ in range\((\d+)\)\]\)?", statement)
    return f"equal experts are a product: write `{found[1]} = {found[3]} * {found[2]}`" if found else _LIST


def _texts(part: list[Token]) -> set[str]:
    return {token.text for token in part}


def _flag(line: str) -> Found:
    """A flag of a command line, with its value if it has one."""
    match = _FLAG.match(line)
    if match is None:
        return "`--` begins no statement", "write `name = value`"
    word, value = match[1], match[2] or ""
    found = elsewhere(word)
    help = found.said(value) if found else "write `name = value`, in the block to which it belongs"
    return f"`--{word}` is a flag of a command line", help


def _dotted(text: str, part: list[Token]) -> tuple[str, int, int] | None:
    """A name with dots, `torch.nn.Linear`, with the indices of its first token and of the one behind it."""
    for at, token in enumerate(part[:-2]):
        if token.kind != "NAME" or part[at + 1].text != "." or part[at + 1].kind != "UNKNOWN":
            continue
        end = at + 1
        while end + 1 < len(part) and part[end].text == "." and part[end + 1].kind == "NAME":
            end += 2
        return (text[token.start : part[end - 1].end], at, end) if end > at + 1 else None
    return None
