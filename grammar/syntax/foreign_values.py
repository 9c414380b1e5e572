"""Values as other languages write them: `torch.bfloat16`, `betas = (0.9, 0.95)`, `${LR}`, `let n: int = 8`.

Each function reads one habit in tokens, as in `notations.py`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from moec.grammar.foreign.lookup import defaults_elsewhere
from moec.grammar.foreign.values import WORDS
from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token

_TAKE_A_NUMBER = frozenset(("topk", "top_k", "factor", "swiglu", "geglu", "gelu", "relu", "relu2", "silu"))
_OPTIMIZER = re.compile(r"(?:torch\.)?optim\.(AdamW|SGD|Muon|Adafactor)\b")


def torch_names(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `torch.bfloat16` as `bf16`, and `torch.optim.AdamW` as `adamw`, whose defaults are others: no fix."""
    text = notations.source.text
    kept: list[Token] = []
    end = 0
    for at, token in enumerate(tokens):
        if token.start < end:
            continue
        behind = tokens[at + 1 : at + 3]
        if token.text in ("torch", "optim") and [each.kind for each in behind] == ["UNKNOWN", "NAME"]:
            optimizer = _OPTIMIZER.match(text, token.start)
            name = optimizer[0] if optimizer else text[token.start : behind[1].end]
            word = optimizer[1].lower() if optimizer else WORDS.get(name)
            if word is not None and word != "fp16":  # which is not compiled yet: advising it would mislead
                end = token.start + len(name)
                help = f"write `{word}`"
                if optimizer:
                    help = f"write `{word}(…)`; {defaults_elsewhere(word) or 'its defaults may be others'}"
                edits = [] if optimizer else [(token.start, end, word)]
                notations.add("MOE0109", token.start, end, f"`{name}` is PyTorch's name", help, *edits)
                token = Token("NAME", word, token.start, end)
        kept.append(token)
    return kept


def types(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `let n: int = 8` without its type."""
    pattern = ["LET", "NAME", "UNKNOWN", "NAME", "EQUAL"]
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        part = tokens[at : at + len(pattern)]
        if tokens[at].kind == "LET" and [token.kind for token in part] == pattern and part[2].text == ":":
            name, first, last = part[1], part[2], part[3]
            edit = (name.end, last.end, "")
            notations.add("MOE0109", first.start, last.end, "a constant has no type", "leave the type out", edit)
            kept += part[:2]
            at += 4
            continue
        kept.append(tokens[at])
        at += 1
    return kept


def betas(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `betas = (0.9, 0.95)`, each of which has a name here."""
    pattern = ["NAME", "EQUAL", "LPAR", "NUMBER", "COMMA", "NUMBER", "RPAR"]
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        part = tokens[at : at + len(pattern)]
        if tokens[at].text != "betas" or [token.kind for token in part] != pattern:
            kept.append(tokens[at])
            at += 1
            continue
        name, equal, _, first, comma, second, last = part
        written = f"beta1 = {first.text}, beta2 = {second.text}"
        edit = (name.start, last.end, written)
        notations.add("MOE0109", name.start, last.end, "two values in parentheses", f"write `{written}`", edit)
        kept += [name._replace(text="beta1"), equal, first, comma]
        kept += [name._replace(text="beta2"), equal, second]
        at += len(pattern)
    return kept


def variables(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `${LR}` and `$LR`, which a shell would fill in, as the constant `LR`; replaces them where there is one."""
    constants = {name.text for word, name in pairwise(tokens) if word.kind == "LET"}
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        dollar, *behind = tokens[at : at + 4]
        kinds = [token.kind for token in behind]
        braced = kinds == ["LBRACE", "NAME", "RBRACE"]
        if dollar.text != "$" or not (braced or kinds[:1] == ["NAME"]):
            kept.append(dollar)
            at += 1
            continue
        name, last = (behind[1], behind[2]) if braced else (behind[0], behind[0])
        message = "`$NAME` is not replaced here"
        help = (
            f"write `let {name.text} = …` at the top of the file, and `{name.text}` here; "
            f"`moec compile --let {name.text}=…` gives it another value"
        )
        edits = [(dollar.start, last.end, name.text)] if name.text in constants else []
        notations.add("MOE0109", dollar.start, last.end, message, help, *edits, habit="variables")
        kept.append(name)
        at += 4 if braced else 2
    return kept


def arguments(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `gate = topk 2` as `gate = topk(2)`."""
    kept: list[Token] = []
    for at, token in enumerate(tokens):
        before, behind = [each.kind for each in kept[-2:]], tokens[at + 1 : at + 2]
        ends = not behind or behind[0].kind in ("SEPARATOR", "RBRACE")
        called = before == ["EQUAL", "NAME"] and kept[-1].text in _TAKE_A_NUMBER
        if token.kind != "NUMBER" or not called or not ends or _splits(notations, kept[-1], token):
            kept.append(token)
            continue
        name = kept[-1]
        edits = (name.end, token.start, "("), (token.end, token.end, ")")
        help = f"write `{name.text}({token.text})`"
        notations.add("MOE0109", token.start, token.end, "an argument stands in parentheses", help, *edits)
        kept += [Token("LPAR", "(", name.end, token.start), token, Token("RPAR", ")", token.end, token.end)]
    return kept


def _splits(notations: Notations, name: Token, token: Token) -> bool:
    """Whether a line ends between two tokens."""
    return "\n" in notations.source.text[name.end : token.start]
