"""Reads a file for the formatter: statements and blocks of tokens, each with its comments."""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.grammar.syntax.tokens import Token, lex

_OPEN, _CLOSE = ("LPAR", "LSQB"), ("RPAR", "RSQB")


@dataclass(slots=True)
class Piece:
    """The tokens between two commas of a bracket, and the comments above, below and behind them."""

    tokens: list[Token | Group] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    behind: str = ""


@dataclass(slots=True)
class Group:
    """A bracket with its pieces; `tail` are the comments before it closes. A `call` or a list may end in a comma."""

    opening: str
    closing: str
    comma: bool
    pieces: list[Piece] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    def commented(self) -> bool:
        """Whether a comment stands anywhere in it, so that it cannot be one line."""
        if self.tail or any(piece.before or piece.behind for piece in self.pieces):
            return True
        inner = (part for piece in self.pieces for part in piece.tokens if isinstance(part, Group))
        return any(group.commented() for group in inner)


@dataclass(slots=True)
class Item:
    """A statement, a block (`body` is not None), or comments on lines of their own (no `tokens`).

    `blank`: an empty line stands above it. `inline`: the block was written on one line, and has no comment in it.
    `opening` is the comment behind the brace that opens a block, `comment` that behind the whole.
    """

    tokens: list[Token | Group]
    blank: bool = False
    body: list[Item] | None = None
    inline: bool = False
    opening: str = ""
    comment: str = ""


def read_items(text: str) -> list[Item]:
    """The items of a text that parses."""
    return _Reader(text).body()


class _Reader:
    """Walks over the tokens once. Brackets are balanced: the text was parsed before."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = lex(text, comments=True)
        self.at = 0
        self.newlines = 2  # since the last thing that is not a newline; nothing above the first line is kept

    def body(self) -> list[Item]:
        items: list[Item] = []
        while (token := self._next()) is not None and token.kind != "RBRACE":
            if token.kind == "SEPARATOR":
                self.newlines += token.text != ";"
                self.at += 1
            elif token.kind == "COMMENT":
                self._comment(token, items)
            else:
                blank = self.newlines > 1 and bool(items)
                item = self._statement()
                item.blank = blank
                items.append(item)
        return items

    def _comment(self, token: Token, items: list[Item]) -> None:
        self.at += 1
        text = token.text.rstrip()
        if self.newlines == 0 and items:
            items[-1].comment = text
        else:
            items.append(Item([], blank=self.newlines > 1 and bool(items), comment=text))
        self.newlines = 0

    def _statement(self) -> Item:
        item = Item([])
        self.newlines = 0
        while (token := self._next()) is not None and token.kind not in ("SEPARATOR", "COMMENT", "RBRACE"):
            if token.kind == "LBRACE":
                self._block(item, token)
                break
            item.tokens.append(self._part(item.tokens))
        return item

    def _block(self, item: Item, opening: Token) -> None:
        self.at += 1
        token = self._next()
        if token is not None and token.kind == "COMMENT":
            item.opening = token.text.rstrip()
            self.at += 1
        self.newlines = 2
        item.body = self.body()
        closing = self.tokens[self.at]
        self.at += 1
        self.newlines = 0
        within = self.text[opening.start : closing.end]
        item.inline = "\n" not in within and not item.opening

    def _part(self, before: list[Token | Group]) -> Token | Group:
        token = self.tokens[self.at]
        self.at += 1
        if token.kind not in _OPEN:
            return token
        # A name before a parenthesis makes a call of it, except the kind of a block before its selector.
        called = bool(before) and isinstance(before[-1], Token) and before[-1].kind == "NAME" and len(before) > 1
        return self._group(token, comma=token.kind == "LSQB" or called)

    def _group(self, opening: Token, comma: bool) -> Group:
        group = Group(opening.text, {"(": ")", "[": "]"}[opening.text], comma)
        piece, fresh = Piece(), True
        while True:
            token = self.tokens[self.at]
            if token.kind in _CLOSE:
                self.at += 1
                break
            if token.kind == "SEPARATOR":
                self.at += 1
                fresh = True
            elif token.kind == "COMMENT":
                self.at += 1
                self._inner_comment(token.text.rstrip(), group, piece, fresh)
            elif token.kind == "COMMA":
                self.at += 1
                piece.before += piece.below
                group.pieces.append(piece)
                piece, fresh = Piece(), False
            else:
                fresh = False
                piece.before, piece.below = piece.before + piece.below, []
                if token.kind in _OPEN:
                    self.at += 1
                    called = bool(piece.tokens) and isinstance(last := piece.tokens[-1], Token) and last.kind == "NAME"
                    piece.tokens.append(self._group(token, comma=token.kind == "LSQB" or called))
                else:
                    piece.tokens.append(token)
                    self.at += 1
        if piece.tokens:
            group.pieces.append(piece)
            group.tail = piece.below
        else:
            group.tail = piece.before
        return group

    def _inner_comment(self, text: str, group: Group, piece: Piece, fresh: bool) -> None:
        """Attaches a comment behind the piece on the same line, otherwise above the next piece."""
        behind = piece if piece.tokens else (group.pieces[-1] if group.pieces else None)
        if not fresh and behind is not None and not behind.behind:
            behind.behind = text
        else:
            (piece.below if piece.tokens else piece.before).append(text)

    def _next(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None
