"""Blocks and calls in each other's brackets: `moe(experts = …)`, `model("m", dim = 64)`, `gate = {type: topk}`."""

from __future__ import annotations

from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token

BLOCKS = frozenset(("model", "layer", "layers", "moe", "train", "parallel", "cluster", "device", "adapt", "level"))
"""Words of blocks."""

CLOSERS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
_KIND_KEYS = frozenset(("type", "name", "kind", "class", "_type", "_target_"))
"""Keys that hold the word of the call."""


def block_calls(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `moe(experts = 8 * swiglu(64), gate = topk(2))` as the block that it is, with or without a brace behind."""
    tokens = list(tokens)
    for at in range(len(tokens) - 2):
        begins = at == 0 or tokens[at - 1].kind in ("SEPARATOR", "LBRACE")
        if not begins or tokens[at].text not in BLOCKS or tokens[at + 1].kind != "LPAR":
            continue
        closing = _closing(tokens, at + 1)
        if closing is not None:
            _read_block_call(notations, tokens, at, closing)
            return block_calls(notations, tokens)
    return tokens


def _read_block_call(notations: Notations, tokens: list[Token], at: int, closing: int) -> None:
    """Replaces, in `tokens`, the brackets and commas of one call by those of a block; a name in front stays there."""
    word, opener, closer = tokens[at].text, tokens[at + 1], tokens[closing]
    commas = _commas(tokens, at + 1, closing)
    named = tokens[at + 2].kind == "STRING" and (commas[:1] == [at + 3] or closing == at + 3)
    label = f" {tokens[at + 2].text}" if named else ""
    message = f"`{word}` is a block, not a call"
    help = f"write `{word}{label} {{ … }}`, and `;` or a new line between what is in it"
    braced = closing + 1 < len(tokens) and tokens[closing + 1].kind == "LBRACE"
    edits = []
    dropped: list[int] = []
    if named:
        edits.append((opener.start, opener.end, " "))
        dropped.append(at + 1)
        commas = commas[1:]
        if closing == at + 3:
            edits.append((closer.start, closer.end, "" if braced else " { }"))
            tokens[closing : closing + 1] = [] if braced else [_as(closer, "LBRACE", "{"), _as(closer, "RBRACE", "}")]
        else:
            comma = tokens[at + 3]
            edits.append((comma.start, comma.end, " {"))
            tokens[at + 3] = _as(comma, "LBRACE", "{")
    else:
        edits.append((opener.start, opener.end, " {"))
        tokens[at + 1] = _as(opener, "LBRACE", "{")
    for comma_at in commas:
        edits.append((tokens[comma_at].start, tokens[comma_at].end, ";"))
        tokens[comma_at] = _as(tokens[comma_at], "SEPARATOR", ";")
    if not (named and closing == at + 3):
        if braced:
            edits.append((closer.start, tokens[closing + 1].end, ";"))
            tokens[closing : closing + 2] = [_as(closer, "SEPARATOR", ";")]
        else:
            edits.append((closer.start, closer.end, " }"))
            tokens[closing] = _as(closer, "RBRACE", "}")
    for index in dropped:
        del tokens[index]
    notations.add("MOE0109", opener.start, opener.end, message, help, *edits)


def values_in_braces(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `heads = {4}` as 4, `[…]` for `{0, 1}`, and `gate = {type: topk, k: 2}` as `gate = topk(k = 2)`.

    Settings without the word of their call are named and not replaced: which call is meant is not said.
    """
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        kept.append(token)
        behind = tokens[at] if at < len(tokens) else None
        value = (
            token.kind == "EQUAL"
            and len(kept) > 1
            and kept[-2].kind == "NAME"
            and kept[-2].text not in BLOCKS
            and behind is not None
            and behind.kind == "LBRACE"
        )
        closing = _closing(tokens, at) if value else None
        if closing is None or any(each.kind in ("LBRACE", "RBRACE") for each in tokens[at + 1 : closing]):
            continue
        inner = [each for each in tokens[at + 1 : closing] if each.kind != "SEPARATOR" or each.text == ";"]
        read = _read_braces(notations, kept[-2].text, tokens[at], inner, tokens[closing])
        kept = [*kept[:-2], Token("ERROR", "", kept[-2].start, tokens[closing].end)] if read is None else [*kept, *read]
        at = closing + 1
    return kept


def _read_braces(
    notations: Notations, name: str, opener: Token, inner: list[Token], closer: Token
) -> list[Token] | None:
    """The tokens of the value that `{ inner }` is; None where no call is said."""
    source = notations.source.text
    pairs = [_pair(part) for part in _parts(inner)]
    if not any(key for key, _ in pairs):
        several = len(pairs) != 1
        text = ", ".join(source[value[0].start : value[-1].end] for _, value in pairs if value)
        left, right = ("[", "]") if several else ("", "")
        help = f"write `{name} = {left}{text}{right}`"
        edits = ((opener.start, opener.end, left), (closer.start, closer.end, right))
        notations.add("MOE0109", opener.start, closer.end, "a value in braces", help, *edits)
        return [_as(opener, "LSQB", "["), *inner, _as(closer, "RSQB", "]")] if several else inner
    word = next((value[0] for key, value in pairs if key in _KIND_KEYS and len(value) == 1), None)
    call = Token("NAME", word.text.strip("\"'"), word.start, word.end) if word is not None else None
    settings = [(key, value) for key, value in pairs if value and (word is None or value[0] is not word)]
    arguments = ", ".join(f"{key} = {source[value[0].start : value[-1].end]}" for key, value in settings)
    help = f"a value with settings is a call: write `{name} = {call.text if call else 'WORD'}({arguments})`"
    edit = [(opener.start, closer.end, f"{call.text}({arguments})")] if call else []
    notations.add("MOE0109", opener.start, opener.end, "settings in braces", help, *edit)
    if call is None:
        return None
    read = [call, _as(opener, "LPAR", "(")]
    for index, (key, value) in enumerate(settings):
        read += [Token("COMMA", ",", value[0].start, value[0].start)] * bool(index)
        read += [Token("NAME", key, value[0].start, value[0].end), Token("EQUAL", "=", value[0].start, value[0].end)]
        read += value
    return [*read, _as(closer, "RPAR", ")")]


def _parts(inner: list[Token]) -> list[list[Token]]:
    """What commas and `;` that are in no brackets separate."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in inner:
        depth += (token.kind in CLOSERS) - (token.kind in CLOSERS.values())
        if token.kind in ("COMMA", "SEPARATOR") and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _pair(part: list[Token]) -> tuple[str, list[Token]]:
    """The key, without quotes, and the value of `key: value` or `key = value`; an empty key for a value alone."""
    if len(part) > 2 and part[0].kind in ("NAME", "STRING") and (part[1].kind == "EQUAL" or part[1].text == ":"):
        return part[0].text.strip("\"'"), part[2:]
    return "", part


def _as(token: Token, kind: str, text: str) -> Token:
    return token._replace(kind=kind, text=text)


def _closing(tokens: list[Token], at: int) -> int | None:
    """The index of the bracket that closes the one at `at`."""
    opener = tokens[at].kind
    depth = 0
    for index in range(at, len(tokens)):
        depth += {opener: 1, CLOSERS[opener]: -1}.get(tokens[index].kind, 0)
        if not depth:
            return index
    return None


def _commas(tokens: list[Token], opener: int, closer: int) -> list[int]:
    """The indices of commas between the two, and in no brackets of their own."""
    found, depth = [], 0
    for index in range(opener + 1, closer):
        kind = tokens[index].kind
        depth += (kind in CLOSERS) - (kind in CLOSERS.values())
        if kind == "COMMA" and not depth:
            found.append(index)
    return found
