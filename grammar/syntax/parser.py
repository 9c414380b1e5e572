"""Text to syntax tree, with every syntax error of the file in one run.

The tables are lark's (see generate.py). This file has its own loop, which recovers from errors: it replaces a statement
that does not parse by an ERROR, and goes on at the next separator.
"""

from __future__ import annotations

import re

from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, Edit
from moec.grammar.foreign_units import instead_of
from moec.grammar.source import Source, Span
from moec.grammar.suggest import nearest
from moec.grammar.syntax.brackets import arrange
from moec.grammar.syntax.builder import Builder
from moec.grammar.syntax.tables import END, KEYWORDS, RULES, START, STATES
from moec.grammar.syntax.tokens import Token, lex
from moec.grammar.syntax.tree import Assignment, Expression, File, Number
from moec.grammar.units import UNITS

_VALUE = frozenset({"NUMBER", "STRING", "NAME", "LPAR", "LSQB"})
_OPERATORS = frozenset(KEYWORDS[text] for text in ("+", "-", "*", "/", ".."))
_TEXTS = {kind: f"`{text}`" for text, kind in KEYWORDS.items()}
REPLACEMENTS = {":": "=", "'": '"', "“": '"', "”": '"', "–": "-", "−": "-", "×": "*", "…": "..", "·": "*"}
"""Characters of other notations, and the `.moe` characters to write instead."""
_INSTEAD = {text: f"write `{ours}`" for text, ours in REPLACEMENTS.items()} | {
    ".": "a fraction begins with a digit, `0.5`; a range has two dots, `0..31`; names have none, `bf16`",
    "%": "write a fraction: `0.01`",
    "^": "write the number: `64` or `1e-4`",
    "$": "a constant is `let NAME = …`; `moec compile --let NAME=…` gives it another value",
    ">": "write `name = value`",
    "`": "leave it out",
}
_LAYERS = "write `layers 3`, `layers 0..3` with the last, `layers 0..6 step 2`, `layers [0, 5]`, or `layers` for all"
_ARGUMENTS = "arguments stand in parentheses: `topk(2)`"
_STATEMENTS = "a statement is `name = value` or `block { … }`; a comment begins with `#`"
_BEHIND = {
    ("NAME", "LSQB"): _ARGUMENTS,
    ("NAME", "NUMBER"): _ARGUMENTS,
    ("STAR", "STAR"): "powers are numbers: `64` or `1e-4`",
    **dict.fromkeys((("SEPARATOR", "MINUS"), ("SEPARATOR", "SLASH"), ("SLASH", "STAR")), _STATEMENTS),
}
"""Help by the kinds of an unexpected token and of the token before it."""

_TEXTS |= {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": 'a "text"',
    "SEPARATOR": "the end of the line",
}


def parse(source: Source) -> tuple[File | None, list[Diagnostic]]:
    """The tree of `source` and its syntax errors. There is no tree only where nesting is too deep to make one."""
    tree, diagnostics = _parsed(source, None)
    if tree is None or not diagnostics:
        return tree, diagnostics
    from moec.grammar.syntax.foreign import translated  # good files do without it

    tokens, habits = translated(source, lex(source.text))
    if tokens is None:
        return File((), Span(source, 0, len(source.text))), habits
    if habits:
        meant, others = _parsed(source, tokens)
        if meant is not None and len(others) < len(diagnostics):
            return meant, _in_order([*habits, *others])
    return tree, diagnostics


def _parsed(source: Source, tokens: list[Token] | None) -> tuple[File | None, list[Diagnostic]]:
    arranged = arrange(source, tokens)
    if arranged.too_deep:
        return None, arranged.diagnostics
    tree, diagnostics = _Parser(source, arranged.tokens, arranged.suspects).run()
    return tree, _in_order([*arranged.diagnostics, *diagnostics])


def _in_order(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    return sorted(diagnostics, key=lambda d: d.span.start if d.span else 0)


def parse_value(name: str, text: str) -> tuple[Expression | None, list[Diagnostic]]:
    """The value that a command line gives to a constant: `16`, `h100`, `topk(2)`."""
    source = Source("--let", f"{name}={text}")
    tree, diagnostics = parse(source)
    if diagnostics or tree is None:
        return None, diagnostics
    match tree.body:
        case (Assignment(value=value),):
            return value, []
    span = Span(source, len(name) + 1, len(source.text))
    return None, [diagnose("MOE0101", span, "expected one value")]


class _Parser:
    """One run of the tables over one file's tokens."""

    def __init__(self, source: Source, tokens: list[Token], suspects: set[int]) -> None:
        self.source = source
        self.tokens = tokens
        self.suspects = suspects
        self.diagnostics: list[Diagnostic] = []
        self.states = [START]
        self.values: list[object] = []
        self.builder = Builder(source)

    def run(self) -> tuple[File, list[Diagnostic]]:
        """Parse it all."""
        index, boundary = 0, True
        while index < len(self.tokens):
            token = self.tokens[index]
            if boundary:  # a statement may begin: the state to return to if it does not parse
                begin, states, values = index, self.states[:], self.values[:]
            if self._feed(token):
                boundary = token.kind in ("SEPARATOR", "LBRACE")
                index += 1
                continue
            meant = self._meant(begin)
            if meant:  # continue with the fixed text, so that the statement still declares its name
                self._repair(begin, meant, token)
                index, boundary = begin, True
                self.states, self.values = states, values
                continue
            end = self._statement_end(begin)
            self._report(token, begin, max(end, index))
            self.states, self.values = states, values
            last = max(end - 1, begin)
            accepted = self._feed(Token("ERROR", "", self.tokens[begin].start, self.tokens[last].end))
            assert accepted, "an ERROR stands wherever a statement may"
            index, boundary = end, False
        tree = self.values[0]
        assert isinstance(tree, File)
        assert self.states[-1] == END
        return tree, self.diagnostics

    def _feed(self, token: Token) -> bool:
        """Takes `token`; returns False if it is not valid here, after reducing the stacks."""
        while True:
            target = STATES[self.states[-1]].get(token.kind)
            if target is None:
                return self.states[-1] == END  # reached by reducing only, so only before `$END`
            if target >= 0:
                self.states.append(target)
                self.values.append(token)
                return True
            origin, action, length = RULES[~target]
            if not action:  # a rule with a single symbol: most reductions
                self.states.pop()
                self.states.append(STATES[self.states[-1]][origin])
                continue
            children = self.values[len(self.values) - length :]
            if length:
                del self.values[-length:], self.states[-length:]
            self.values.append(self._reduce(action, children))
            self.states.append(STATES[self.states[-1]][origin])

    def _reduce(self, action: str, children: list[object]) -> object:
        if any(type(child) is list for child in children):
            flat: list[object] = []
            for child in children:
                if type(child) is not list:
                    flat.append(child)
                elif flat:
                    flat.extend(child)
                else:  # grown in place: a list of n parts costs n, not n squared
                    flat = child
            children = flat
        return children if action == "_" else getattr(self.builder, action)(*children)

    def _statement_end(self, begin: int) -> int:
        """Index of the separator or brace that ends what begins at `begin`."""
        end = begin
        while self.tokens[end].kind not in ("SEPARATOR", "LBRACE", "RBRACE", "$END"):
            end += 1
        return end

    def _meant(self, begin: int) -> str:
        """The keyword that a statement must begin with, if its first name is none: only one makes sense of the rest."""
        kinds = [token.kind for token in self.tokens[begin : begin + 3]]
        if kinds == ["NAME", "NAME", "EQUAL"]:
            return "let"
        return "use" if kinds in (["NAME", "STRING", "SEPARATOR"], ["NAME", "STRING", "$END"]) else ""

    def _repair(self, begin: int, meant: str, token: Token) -> None:
        first = self.tokens[begin]
        span = Span(self.source, first.start, first.end)
        help = f"did you mean `{meant}`?"
        message = f"no statement begins so: {_described(token)} cannot follow"
        self.diagnostics.append(diagnose("MOE0101", span, message, help=help, fix=[Edit(span, meant)]))
        self.tokens[begin] = first._replace(kind=KEYWORDS[meant])

    def _report(self, token: Token, begin: int, end: int) -> None:
        extent = range(self.tokens[begin].start, self.tokens[end].end + 1)
        if any(offset in extent for offset in self.suspects):
            return  # its brackets were diagnosed already
        if token.kind == "ERROR":
            return  # so was the notation in its place
        span = Span(self.source, token.start, max(token.end, token.start))
        selects = self.tokens[begin].text == "layers" and token.kind != "NAME"
        if token.kind == "UNKNOWN":
            help = _LAYERS if selects else _INSTEAD.get(token.text, "")
            self.diagnostics.append(diagnose("MOE0102", span, _unknown(token), help=help))
        elif token.kind == "UNCLOSED":
            self.diagnostics.append(diagnose("MOE0103", span, 'no `"` until the end of the line'))
        else:
            message = f"expected {_listed(self._expected())}, found {_described(token)}"
            meant = self._keyword(token)
            if meant:
                help = f"did you mean `{meant.text}`?"
                self.diagnostics.append(diagnose("MOE0101", span, message, help=help, fix=[meant]))
                return
            help, fix = self._advice(token) or self._list_help(token, begin), self._joined(token)
            at = self.tokens.index(token, begin)
            before = self.tokens[at - 1].kind if at else "SEPARATOR"
            help = help or (_LAYERS if selects else _BEHIND.get((before, token.kind), ""))
            self.diagnostics.append(diagnose("MOE0101", span, message, help=help, fix=fix))

    def _expected(self) -> set[str]:
        return {kind for kind in STATES[self.states[-1]] if kind.isupper() and self._would_take(kind)}

    def _would_take(self, kind: str) -> bool:
        """Whether a token of `kind` would be shifted: a row of the table also holds look-aheads that fail later."""
        states = self.states[:]
        while (target := STATES[states[-1]].get(kind)) is not None and target < 0:
            origin, _, length = RULES[~target]
            del states[len(states) - length :]
            states.append(STATES[states[-1]][origin])
        return target is not None

    def _keyword(self, token: Token) -> Edit | None:
        """An edit to a similar keyword, where a name cannot stand but the keyword can."""
        if token.kind != "NAME":
            return None
        words = [text for text, kind in KEYWORDS.items() if text.isalpha() and self._would_take(kind)]
        meant = nearest(token.text, words)
        return Edit(Span(self.source, token.start, token.end), meant) if meant else None

    def _joined(self, token: Token) -> list[Edit]:
        """An edit that removes the blank between a number and its unit."""
        previous = self.values[-1] if self.values else None
        if token.kind != "NAME" or token.text not in UNITS or not isinstance(previous, Number | Token):
            return []
        end = previous.span.end if isinstance(previous, Number) else previous.end
        return [Edit(Span(self.source, end, token.start), "")] if _is_number(previous) else []

    def _advice(self, token: Token) -> str:
        previous = self.values[-1] if self.values else None
        unit = token.kind == "NAME" and token.text.lower() in {unit.lower() for unit in UNITS}
        if unit and isinstance(previous, Number | Token) and _is_number(previous):
            per = re.match(r"/\w+", self.source.text[token.end :])
            written = f"{token.text}{per[0] if per else ''}"
            instead = None if written in UNITS else instead_of(previous.text, written)
            return instead.help if instead else f"a unit comes right after its number: `{previous.text}{written}`"
        if token.kind in ("USE", "LET", "STEP"):
            return f"`{token.text}` is a word of the language; another name is needed here"
        if token.kind == "NUMBER" and token.text[-1].isalpha() and "EQUAL" not in self._expected():
            return "names begin with a letter"
        return ""

    def _list_help(self, token: Token, begin: int) -> str:
        """Help for the comma behind a word or call that a name is given: `balance = switch_loss(0.01), …`."""
        kinds = [token.kind for token in self.tokens[begin : begin + 3]]
        ends = token.kind == "COMMA" and "SEPARATOR" in self._expected()
        if not ends or kinds != ["NAME", "EQUAL", "NAME"]:
            return ""
        end = self.source.text.find("\n", token.start)
        line = self.source.text[self.tokens[begin].start : end if end >= 0 else None]
        name, _, values = re.split(r";|//|#|}", line)[0].partition("=")
        return f"several values stand in brackets: `{name.strip()} = [{values.strip()}]`"


def _is_number(value: Number | Token) -> bool:
    return isinstance(value, Number) or value.kind == "NUMBER"


def _listed(kinds: set[str]) -> str:
    """The tokens that are valid here, as text for a message."""
    words = []
    rest = kinds - {"ERROR", "$END"}
    if rest >= _VALUE:
        words.append("a value")
        rest -= _VALUE | {"MINUS"}
    if rest & {"NAME", "USE", "LET"} == {"NAME", "USE", "LET"}:
        words.append("a statement")
        rest -= {"NAME", "USE", "LET"}
    if len(rest - _OPERATORS) + len(words):
        rest -= _OPERATORS
    words += sorted((_TEXTS[kind] for kind in rest), key=lambda word: (word.startswith("the "), word))
    if len(words) < 2:
        return "".join(words) or "the end of the file"
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _described(token: Token) -> str:
    if token.kind == "$END":
        return "the end of the file"
    if token.kind == "SEPARATOR" and token.text != ";":
        return "the end of the line"
    return f"`{token.text}`" if len(token.text) <= 40 else f"`{token.text[:40]}…`"


def _unknown(token: Token) -> str:
    return f"U+{ord(token.text):04X} has no meaning in a .moe file"
