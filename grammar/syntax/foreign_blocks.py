"""Blocks and calls in each other's brackets: `moe(experts = …)`, `model("m", dim = 64)`, `gate = {type: topk}`."""

from __future__ import annotations

import re
from itertools import pairwise

from moec.grammar.foreign.lookup import alias, defaults_elsewhere, near, synonym
from moec.grammar.foreign.values import OPTIMIZERS
from moec.grammar.spec.base import field_names
from moec.grammar.spec.optimizers import OPTIMIZERS as OWN
from moec.grammar.syntax.notations import Notations
from moec.grammar.syntax.tokens import Token

BLOCKS = frozenset(("model", "layer", "layers", "moe", "train", "parallel", "cluster", "device", "adapt", "level"))
"""Words of blocks."""

CLOSERS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
_VALUE_KEYS = frozenset(("stage", "enabled", "value"))
"""Keys that hold the value of the name itself: `zero_optimization = {stage = 2}`."""
_KIND_KEYS = frozenset(("type", "name", "kind", "class", "_type", "_target_"))
"""Keys that hold the word of the call."""


_KINDS = {"{": "LBRACE", "}": "RBRACE", ";": "SEPARATOR"}


def block_calls(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `moe(experts = 8 * swiglu(64), gate = topk(2))` as the block that it is, with or without a brace behind."""
    replaced: dict[int, list[Token]] = {}
    for at in range(len(tokens) - 2):
        before = replaced.get(at - 1, tokens[at - 1 : at])
        begins = at == 0 or any(token.kind in ("SEPARATOR", "LBRACE") for token in before[-1:])
        if not begins or tokens[at].text not in BLOCKS or tokens[at + 1].kind != "LPAR":
            continue
        closing, commas = split(tokens, at + 1)
        if closing is not None:
            commas = [comma for comma in commas if comma not in replaced]  # brackets that do not match share commas
            replaced |= _block_for_call(notations, tokens, at, closing, commas)
    return [each for index, token in enumerate(tokens) for each in replaced.get(index, (token,))]


def _block_for_call(
    notations: Notations, tokens: list[Token], at: int, closing: int, commas: list[int]
) -> dict[int, list[Token]]:
    """The tokens of a block in place of the call's brackets and commas, by index; a name in front stays there."""
    named = tokens[at + 2].kind == "STRING" and (commas[:1] == [at + 3] or closing == at + 3)
    braced = any(token.kind == "LBRACE" for token in tokens[closing + 1 : closing + 2])
    changes = [(at + 1, at + 1, " " if named else " {")]
    """The first and the last token of each change, and the text in their place."""
    if named and commas:
        changes.append((commas[0], commas[0], " {"))
    changes += [(comma, comma, ";") for comma in commas[named:]]
    if named and not commas:
        changes.append((closing, closing, "" if braced else " { }"))
    elif braced:
        changes.append((closing, closing + 1, ";"))
    else:
        changes.append((closing, closing, " }"))
    word, opener = tokens[at].text, tokens[at + 1]
    label = f" {tokens[at + 2].text}" if named else ""
    message = f"`{word}` is a block, not a call"
    help = f"write `{word}{label} {{ … }}`, and `;` or a new line between what is in it"
    edits = [(tokens[first].start, tokens[last].end, text) for first, last, text in changes]
    notations.add("MOE0109", opener.start, opener.end, message, help, *edits)
    replaced: dict[int, list[Token]] = {}
    for first, last, text in changes:
        replaced[first] = []
        replaced[last] = [_as(tokens[first], _KINDS[mark], mark) for mark in text.split()]
    return replaced


def lists_of_blocks(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `layers = [{ … }, { … }]` as one block after the other."""
    kept: list[Token] = []
    left_out: set[int] = set()
    heads: dict[int, Token] = {}
    for at, token in enumerate(tokens):
        behind = [i for i in range(at + 1, min(at + 9, len(tokens))) if tokens[i].kind != "SEPARATOR"][:3]
        kinds = [tokens[i].kind for i in behind]
        if token.text in BLOCKS and kinds == ["EQUAL", "LSQB", "LBRACE"]:
            closing, commas = split(tokens, behind[1])
            if closing is None:
                continue
            help = (
                f"write `{token.text} {{ … }}`; another one behind it, `{token.text} 0 {{ … }}`, replaces what it names"
            )
            if token.text != "layers":
                help = f"write `{token.text} {{ … }}`, once for each"
            notations.add("MOE0109", token.start, tokens[behind[1]].end, f"`{token.text}` is a block, not a list", help)
            left_out |= {*range(at + 1, behind[2]), closing}
            heads |= dict.fromkeys(commas, token)
    for at, token in enumerate(tokens):
        if at in heads:
            kept += [_as(token, "SEPARATOR", ";"), heads[at]]
        elif at not in left_out:
            kept.append(token)
    return kept


def values_in_braces(notations: Notations, tokens: list[Token]) -> list[Token]:
    """Reads `heads = {4}` as 4, `[…]` for `{0, 1}`, and `gate = {type: topk, k: 2}` as `gate = topk(k = 2)`.

    Settings without the word of their call get an error and no fix: which call is meant is not known.
    """
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        kept.append(token)
        behind = tokens[at] if at < len(tokens) else None
        value = (
            (token.kind == "EQUAL" or token.text == ":")
            and len(kept) > 1
            and kept[-2].kind == "NAME"
            and kept[-2].text not in BLOCKS
            and behind is not None
            and behind.kind == "LBRACE"
        )
        closing, ends = split(tokens, at, (",", ";")) if value else (None, [])
        if closing is None:
            continue
        bounds = (at, *ends, closing)
        parts = [_without_newlines(tokens[first + 1 : last]) for first, last in pairwise(bounds)]
        pairs = [_pair(part) for part in parts if part]
        keyed = any(key for key, _ in pairs)
        if any(each.kind == "LBRACE" for each in tokens[at + 1 : closing]) and not keyed:
            continue
        read = (
            _settings(notations, kept[-2].text, pairs, tokens[at], tokens[closing])
            if keyed
            else _values(notations, kept[-2].text, tokens, bounds)
        )
        if read is None:
            kept[-2:] = [Token("ERROR", "", kept[-2].start, tokens[closing].end)]
        else:
            kept += read
        at = closing + 1
    return kept


def _values(notations: Notations, name: str, tokens: list[Token], bounds: tuple[int, ...]) -> list[Token]:
    """The tokens of the value or values that are in braces.

    `bounds` are the indices of the opening brace, of the commas and `;` between the parts, and of the closing brace.
    """
    source, opener, closer = notations.source.text, tokens[bounds[0]], tokens[bounds[-1]]
    parts = [_without_newlines(tokens[first + 1 : last]) for first, last in pairwise(bounds)]
    values = [part for part in parts if part]
    several = len(values) != 1
    text = ", ".join(source[value[0].start : value[-1].end] for value in values)
    left, right = ("[", "]") if several else ("", "")
    edits = [(opener.start, opener.end, left), (closer.start, closer.end, right)]
    inner = _without_newlines(tokens[bounds[0] + 1 : bounds[-1]])
    if several:
        ends = [tokens[end] for end in bounds[1:-1] if tokens[end].kind == "SEPARATOR"]
        edits += [(end.start, end.end, ",") for end in ends]
        inner = [_as(token, "COMMA", ",") if token in ends else token for token in inner]
        inner = [_as(opener, "LSQB", "["), *inner, _as(closer, "RSQB", "]")]
    help = f"write `{name} = {left}{text}{right}`"
    notations.add("MOE0109", opener.start, closer.end, "a value in braces", help, *edits)
    return inner


Pair = tuple[str, list[Token]]
"""A key and the tokens of its value."""


def _settings(notations: Notations, name: str, pairs: list[Pair], opener: Token, closer: Token) -> list[Token] | None:
    """Reports `{key: value, …}`, and gives the tokens of the call that it means; None where no call is said."""
    source = notations.source.text
    kind = next((value[0] for key, value in pairs if key in _KIND_KEYS and len(value) == 1), None)
    settings = [(key, value) for key, value in pairs if value and value[0] is not kind]
    arguments = ", ".join(f"{key} = {_text(source, value)}" for key, value in _flat(settings))
    word = kind.text.strip("\"'").lower() if kind is not None else "WORD"
    place = opener.start, closer.end
    help, edits = f"a value with settings is a call: write `{name} = {word}({arguments})`", []
    if name == "experts":
        help = f"experts are a product: write `{_experts(source, word if kind else 'swiglu', settings)}`"
    elif kind is not None and name == "optimizer" and not _is_plain(word):
        help = _optimizer(source, word, _flat(settings))
    elif kind is not None and _flat(settings) == settings:
        edits = [(*place, f"{word}({arguments})")]
    elif kind is None and name == "balance":
        terms = ", ".join(f"{key}({_text(source, value)})" for key, value in settings)
        help, edits = f"terms are a list of calls: write `balance = [{terms}]`", [(*place, f"[{terms}]")]
    elif kind is None and [key for key, _ in settings if key in _VALUE_KEYS] and len(settings) == 1:
        found = alias(name)
        help = found.said(_text(source, settings[0][1])) if found else help
    notations.add("MOE0109", opener.start, opener.end, "settings in braces", help, *edits)
    if kind is None or not edits:
        return None
    read = [kind._replace(kind="NAME", text=word), _as(opener, "LPAR", "(")]
    for index, (key, value) in enumerate(settings):
        start, end = value[0].start, value[0].end
        read += [Token("COMMA", ",", start, start)] * bool(index)
        read += [Token("NAME", key, start, end), Token("EQUAL", "=", start, end), *value]
    return [*read, _as(closer, "RPAR", ")")]


def _optimizer(source: str, word: str, settings: list[Pair]) -> str:
    """Help for an optimizer of DeepSpeed's or PyTorch's. DeepSpeed's Adam is AdamW unless `adam_w_mode` is false."""
    given = {key: _text(source, value) for key, value in settings}
    is_adam = word == "adam" and given.get("adam_w_mode", "true").lower() == "true"
    same = "adamw" if is_adam else synonym(word) or word
    if same not in OWN:
        return near(word) or OPTIMIZERS
    if betas := re.fullmatch(r"[\[(]\s*([^,\s]+)\s*,\s*([^,\s]+)\s*[\])]", given.get("betas", "")):
        given |= {"beta1": betas[1], "beta2": betas[2]}
    texts = {key: given[key] for key in field_names(OWN[same]) if key in given}
    texts = {key: "…" if text.strip("\"'") == "auto" else text for key, text in texts.items()}
    call = f"{same}({', '.join(f'{key} = {text}' for key, text in texts.items())})"
    help = f"a value with settings is a call: write `optimizer = {call}`"
    if is_adam:
        help = f"DeepSpeed's Adam is AdamW, unless `adam_w_mode` is false: write `optimizer = {call}`"
    other_defaults = defaults_elsewhere(same, texts)
    return f"{help}; {other_defaults}" if other_defaults else help


def _is_plain(word: str) -> bool:
    """Whether the optimizer's settings have the same names here: it has no two betas, which are one pair elsewhere."""
    return word in OWN and "beta1" not in field_names(OWN[word])


def _experts(source: str, word: str, settings: list[Pair]) -> str:
    """The product of the experts that settings such as `{type: swiglu, num: 8}` describe."""
    said = {key.removeprefix("num_").removeprefix("n_"): _text(source, value) for key, value in settings}
    number = next((said[key] for key in ("num", "n", "count", "number", "experts") if key in said), "NUMBER")
    widths = (said[key] for key in said if key in ("width", "dim") or re.search("hidden|intermediate|ff", key))
    return f"{number} * {word}({next(widths, 'WIDTH')})"


def _flat(settings: list[Pair]) -> list[Pair]:
    """The settings, and in place of a group of them, `"params": {"lr": 3e-4}`, those that are in it."""
    found: list[Pair] = []
    for key, value in settings:
        if value[0].kind != "LBRACE":
            found.append((key, value))
            continue
        closing, commas = split(value, 0, (",", ";"))
        bounds = [0, *commas, len(value) - 1 if closing is None else closing]
        parts = [_without_newlines(value[first + 1 : last]) for first, last in pairwise(bounds)]
        found += [pair for pair in map(_pair, filter(None, parts)) if pair[0] and pair[1]]
    return found


def _text(source: str, value: list[Token]) -> str:
    return source[value[0].start : value[-1].end]


def _without_newlines(tokens: list[Token]) -> list[Token]:
    return [token for token in tokens if token.kind != "SEPARATOR" or token.text == ";"]


def _pair(part: list[Token]) -> Pair:
    """The key, without quotes, and the value of `key: value` or `key = value`; an empty key for a value alone."""
    if len(part) > 2 and part[0].kind in ("NAME", "STRING") and (part[1].kind == "EQUAL" or part[1].text == ":"):
        return part[0].text.strip("\"'"), part[2:]
    return "", part


def _as(token: Token, kind: str, text: str) -> Token:
    return token._replace(kind=kind, text=text)


def split(tokens: list[Token], opener: int, ends: tuple[str, ...] = (",",)) -> tuple[int | None, list[int]]:
    """The index of the bracket that closes `opener`, None if none does, and those of `ends` in no inner brackets."""
    left, right = tokens[opener].kind, CLOSERS[tokens[opener].kind]
    found: list[int] = []
    depth = depth_of_kind = 0
    for index in range(opener, len(tokens)):
        kind = tokens[index].kind
        depth += (kind in CLOSERS) - (kind in CLOSERS.values())
        depth_of_kind += (kind == left) - (kind == right)
        if not depth_of_kind:
            return index, found
        if depth == 1 and tokens[index].text in ends:
            found.append(index)
    return None, []
