"""All mutants of a template of kernels, from its Triton lines: by tokens, because a template is no Python yet.

What Jinja writes (`{{ … }}`, `{% … %}`), strings, comments and docstrings are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mutation.mutant import Mutant

HIDDEN = re.compile(r"{{.*?}}|{%.*?%}|{#.*?#}|\"[^\"]*\"|#.*")
COMPARISON = re.compile(r"(?<= )(<=|>=|==|!=|<|>)(?= )")
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SIGN = re.compile(r"(?<= )(\+=|-=|\+|-|//|\*|%|&|\|)(?= )")
SIGNS = {"+=": "-=", "-=": "+=", "+": "-", "-": "+", "//": "*", "*": "+", "%": "*", "&": "|", "|": "&"}
CONSTANT = re.compile(r"(?<![\w.\[])\d+(\.\d+)?(?![\w.])")
MASK = re.compile(r", mask=")
REDUCTION = re.compile(r"\btl\.(sum|max|min|cumsum)\(")
STATEMENT = re.compile(r"tl\.(store|atomic_add)\(|(?P<name>\w+)(?P<index>\[.*\])? ([-+*&|]?)= ")


def template_mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of the template, in the order of its lines."""
    found: list[Mutant] = []
    offset, documented = 0, False
    for number, line in enumerate(source.decode().splitlines(keepends=True), 1):
        quotes = line.count('"""')
        if not documented and not quotes:
            for kind, start, end, after in _edits(line):
                left = offset + len(line[:start].encode())
                before = line[start:end]
                right = left + len(before.encode())
                found.append(Mutant(file, kind, number, left, right, before, after, number, number, True))
        documented ^= quotes % 2 == 1
        offset += len(line.encode())
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _edits(line: str) -> Iterator[tuple[str, int, int, str]]:
    """Kind, first and last column, and the new text, of each edit of a line."""
    code = HIDDEN.sub(lambda found: "J" * len(found[0]), line)
    if code.lstrip().startswith(("import ", "from ", "@", "def ", "J\n")):
        return
    for found in COMPARISON.finditer(code):
        yield "comparison", *found.span(), COMPARISONS[found[0]]
    for found in SIGN.finditer(code):
        yield "sign", *found.span(), SIGNS[found[0]]
    for found in CONSTANT.finditer(code):
        value = float(found[0]) + 1 if found[1] else int(found[0]) + 1
        yield "constant", *found.span(), str(value)
    for found in MASK.finditer(code):
        if (end := _closing(code, found.end())) is not None:
            yield "mask", found.start(), end, ""
    for found in REDUCTION.finditer(code):
        if (end := _closing(code, found.end())) is not None:
            first = _closing(code, found.end(), ",)")
            yield "reduction", found.start(), end + 1, f"({line[found.end() : first]})"
    if (begun := _statement(code)) is not None:
        yield "statement", begun, len(line.rstrip()), "pass"


def _statement(code: str) -> int | None:
    """The column of a statement that can be left out: a store, or a new value of a name that has one."""
    begun = len(code) - len(code.lstrip())
    found = STATEMENT.match(code, begun)
    if found is None or _closing(code + ")", begun) != len(code):
        return None
    name, augmented = found["name"], found[4]
    again = name is not None and (augmented or re.search(rf"\b{name}\b", code[found.end() :]))
    return begun if name is None or again else None


def _closing(code: str, start: int, ends: str = ")") -> int | None:
    """The column of the first of `ends` outside of the brackets that open from `start` on."""
    depth = 0
    for column in range(start, len(code)):
        if depth == 0 and code[column] in ends:
            return column
        depth += (code[column] in "([") - (code[column] in ")]")
        if depth < 0:
            return None
    return None
