"""One change to one piece of a source file."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from hashlib import sha256

from jinja2 import Environment, TemplateSyntaxError


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` at byte offsets [start, end) of `file` becomes `after`.

    `first` and `last` are the lines (from 1) of the statement, or of its head if it has a body. `line` is that of
    `start`. `in_function`: whether the lines run when a function is called, not on import.
    """

    file: str
    kind: str
    line: int
    start: int
    end: int
    before: str
    after: str
    first: int
    last: int
    in_function: bool

    def applied(self, source: bytes) -> bytes:
        """The file with the change. Raises `ValueError` if the file is another one."""
        if source[self.start : self.end].decode() != self.before:
            raise ValueError(f"{self.file}:{self.line} is not {self.before!r}")
        return source[: self.start] + self.after.encode() + source[self.end :]

    def key(self, source: bytes) -> str:
        """Names the mutant in the results: another text of its file makes it another mutant."""
        text = f"{self.file}\n{self.start}\n{self.end}\n{self.after}\n".encode()
        return sha256(text + source).hexdigest()[:16]

    def is_change(self, source: bytes) -> bool:
        """Whether the changed file compiles and is not the same program (templates: parses, and differs)."""
        changed = self.applied(source)
        try:
            if self.file.endswith(".j2"):
                Environment().parse(changed.decode())
                return changed != source
            tree = ast.parse(changed)
            compile(tree, self.file, "exec")
        except (SyntaxError, ValueError, TemplateSyntaxError):
            return False
        return ast.dump(tree) != ast.dump(ast.parse(source))


class Positions:
    """Byte offsets of lines and columns of a source."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.pattern) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.pattern) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def line(self, offset: int) -> int:
        return self.source.count(b"\n", 0, offset) + 1

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()
