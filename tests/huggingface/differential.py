"""One config through transformers and through moec: equal logits, a refusal by moec, or no model of transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from huggingface.decoders import ROWS, config_of, usual
from huggingface.equal import LEAVE_OUT, of_config, text
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.read import INERT, read_config
from moec.grammar.spec import Spec

Keys = dict[str, Any]
MOST_WEIGHTS = 2_000_000
"""A model with more is compared by its config as its class writes it, and not by its logits."""


@dataclass
class Verdicts:
    """How many configs of a family ended how; `wrong` has each that differs."""

    equal: int = 0
    refused: int = 0
    unmade: int = 0
    wrong: list[str] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, config: Keys, kind: type[PreTrainedModel]) -> None:
        """Tries a config; `kind` is the class of its model."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = self._verdict(config, kind)
        if verdict in ("equal", "refused", "unmade"):
            setattr(self, verdict, getattr(self, verdict) + 1)
        else:
            self.wrong.append(f"{config['model_type']}, {name}: {verdict}")

    def _verdict(self, config: Keys, kind: type[PreTrainedModel]) -> str:
        theirs = config_of_class(config)
        if theirs is None:
            read(config)  # fails unless moec reads it, or refuses it with one of two codes
            return "unmade"
        ours = read(config)
        if ours is None:
            return "refused"
        written = json.dumps(theirs.to_dict(), default=str, sort_keys=True)
        key = f"{written} {ours.model!r}"
        if key not in self._known:
            self._known[key] = compared(kind, theirs, ours)
        return self._known[key]


def config_of_class(config: Keys) -> Any:
    """The class's config, or None where it refuses the keys."""
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    except Exception:  # noqa: BLE001 - whatever a class raises, it has no model of these keys
        return None


def read(config: Keys) -> Spec | None:
    """The Spec, or None where moec refuses the config."""
    try:
        return read_config(deepcopy(config)).spec
    except DiagnosticError as error:
        codes = {found.code for found in error.diagnostics}
        assert codes <= {"MOE0902", "MOE0903"}, codes
        return None


def compared(kind: type[PreTrainedModel], known: Any, spec: Spec) -> str:
    """`equal`, `unmade`, or what differs."""
    try:
        with torch.device("meta"):
            empty = kind._from_config(deepcopy(known), attn_implementation="eager")
    except Exception:  # noqa: BLE001 - the same
        return "unmade"
    if sum(each.numel() for each in empty.parameters()) > MOST_WEIGHTS:
        again = read(json.loads(json.dumps(known.to_dict(), default=str)))
        if again is None:
            return "moec refuses what the class writes"
        return "equal" if again.model == spec.model else "another model than of the class's keys"
    try:
        theirs = of_config(kind, known)
        with torch.no_grad():
            wanted = theirs(input_ids=text()).logits
    except Exception:  # noqa: BLE001 - the same
        return "unmade"
    if not wanted.isfinite().all():
        return "unmade"
    try:
        ours = moec.reference(spec).eval()
        moec.load_hf(ours, theirs.state_dict())
        with torch.no_grad():
            logits = ours(text()).logits
    except DiagnosticError as error:
        first = error.diagnostics[0]
        return "refused" if first.code == "MOE0702" else f"{first.code} {first.message}"  # 0702: a short context
    off = float((logits - wanted).abs().max())
    return "equal" if off <= 1e-5 * max(1.0, float(wanted.abs().max())) else f"logits are off by {off:.2g}"


# ---- the configs that are tried ---------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
YARN: Keys = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3: Keys = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR: Keys = {"rope_type": "linear", "factor": 2.0}
BY_KIND: Keys = {
    FULL: {"rope_type": "default", "rope_theta": 5e3}, SLIDING: {"rope_type": "default", "rope_theta": 99.0},
}  # fmt: skip
OUTSIDE: dict[str, Keys] = {
    "": {},
    "theta": {"rope_theta": 77.0},
    "null theta": {"rope_theta": None},
    "part": {"partial_rotary_factor": 0.5},
    "null part": {"partial_rotary_factor": None},
    "theta, part": {"rope_theta": 77.0, "partial_rotary_factor": 0.5},
    "original": {"original_max_position_embeddings": 8},
    "rotary dim": {"rotary_dim": 4},
}
INSIDE: dict[str, Any] = {
    "left out": LEAVE_OUT,
    "null": None,
    "empty": {},
    "theta": {"rope_theta": 55.0},
    "null theta": {"rope_theta": None, "rope_type": "default"},
    "part": {"rope_theta": 55.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    "null part": {"rope_theta": 55.0, "rope_type": "default", "partial_rotary_factor": None},
    "null type": {"rope_theta": 55.0, "rope_type": None},
    "null type, old": {"rope_theta": 55.0, "rope_type": None, "type": "linear", "factor": 2.0},
    "two types": {"rope_theta": 55.0, "rope_type": "default", "type": "linear", "factor": 2.0},
    "linear": LINEAR,
    "linear, old": {"type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0},
    "null alpha": {"rope_type": "dynamic", "factor": 2.0, "alpha": None},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, theta": {**YARN, "rope_theta": 55.0},
    "yarn, old": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "by kind": BY_KIND,
    "by kind, one null": {**BY_KIND, SLIDING: None},
    "by kind, one left out": {FULL: BY_KIND[FULL]},
    "by kind, no theta": {FULL: {"rope_type": "default"}, SLIDING: {"rope_type": "default", "rope_theta": 99.0}},
}
INNER: dict[str, Keys] = {"yarn": {
    **YARN, "rope_theta": 55.0, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "attention_factor": 1.3, "truncate": False,
}, "llama3": {**LLAMA3, "rope_theta": 55.0}, "linear": {**LINEAR, "rope_theta": 55.0}}  # fmt: skip


def positions(base: Keys) -> Iterator[tuple[str, Keys]]:
    """Both spellings of rotary positions, with keys inside and outside of them."""
    less = {key: value for key, value in base.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    for spelling in ("rope_parameters", "rope_scaling"):
        for inside, given in INSIDE.items():
            for outside, keys in OUTSIDE.items():
                config = {**less, **keys} if given == LEAVE_OUT else {**less, **keys, spelling: given}
                yield f"{spelling} {inside}, outside {outside or 'nothing'}", config
    yield "both spellings", {**less, "rope_parameters": {**YARN, "rope_theta": 5.0}, "rope_scaling": LINEAR}
    yield "both, one empty", {**less, "rope_parameters": {**YARN, "rope_theta": 5.0}, "rope_scaling": {}}
    yield "both, one null", {**less, "rope_parameters": None, "rope_scaling": LINEAR}
    for kind, given in INNER.items():
        for key in given:
            for less_of in ((), ("attention_factor",), ("mscale",), ("attention_factor", "mscale", "mscale_all_dim")):
                rest = {each: value for each, value in given.items() if each != key and each not in less_of}
                yield f"{kind} without {key} {less_of}", {**less, "rope_parameters": rest}
                yield f"{kind}, null {key} {less_of}", {**less, "rope_parameters": {**rest, key: None}}
                yield f"{kind}, 0 {key} {less_of}", {**less, "rope_parameters": {**rest, key: 0}}


@cache
def pool() -> Keys:
    """Every key of every family's rows and class, each with a value."""
    found: Keys = {"rotary_dim": 4, "rope_theta": 77.0, "partial_rotary_factor": 0.5, "rotary_pct": 0.5}
    for model_type, (_, variants) in ROWS.items():
        found |= {key: value for key, value in whole(model_type).items() if value is not None}
        for name in variants:
            found |= {
                key: value for key, value in config_of(model_type, name).items() if value not in (None, LEAVE_OUT)
            }
    return {key: value for key, value in found.items() if key not in INERT and not key.startswith("rope_")}


@cache
def whole(model_type: str) -> Keys:
    """The usual config with every key that the class writes."""
    made = config_of_class(usual(model_type))
    values = json.loads(json.dumps(made.to_dict(), default=str))
    return {key: value for key, value in values.items() if key not in ("dtype", "id2label", "label2id")}


def others_of(value: Any) -> tuple[Any, ...]:
    """Values in place of one."""
    match value:
        case bool():
            return (not value,)
        case int():
            return (value * 2, value + 1, 1, 0)
        case float():
            return (value * 1.5, 0.5, 1.0)
        case str():
            return ("gelu", "sigmoid", "softmax", "noaux_tc", "greedy", "x")
        case list() if value and len(set(map(str, value))) > 1:
            return (value[::-1], [], value[:1])
        case list():
            return ([], [0])
    return (True, 2, 0.5)


def cases_of(model_type: str) -> Iterator[tuple[str, Keys]]:
    """Every key left out, null, changed, by its other names, and keys of other families."""
    few, every = usual(model_type), whole(model_type)
    if model_type == "dbrx":
        few["attn_config"]["rope_theta"] = 1e4  # which transformers 5.23 does not use, and DBRX's own code does
    alias = CONFIG_MAPPING[model_type].attribute_map
    asked = Config(few)
    BY_TYPE[model_type].model_of(asked)
    keys = sorted((asked.asked | every.keys() | alias.keys()) - INERT - {"rope_parameters", "rope_scaling"})
    for key in keys:
        for kind, base in (("few", few), ("all", every)):
            less = {each: value for each, value in base.items() if each != key}
            yield f"{kind}: {key} left out", less
            yield f"{kind}: {key} null", {**base, key: None}
        value = every.get(key, few.get(key, pool().get(key)))
        for other in others_of(value):
            yield f"{key} {other}", {**few, key: other}
            yield f"all: {key} {other}", {**every, key: other}
    for name, key in alias.items():
        value = every.get(key, few.get(key))
        less = {each: value for each, value in few.items() if each not in (key, name)}
        for other in (value, *others_of(value), None):
            yield f"{name} {other} for {key}", {**less, name: other}
            yield f"{name} {other} and {key}", {**few, key: value, name: other}
            yield f"{key} {other} and {name} {value}", {**few, key: other, name: value}
    for key, value in pool().items():
        if key not in keys:
            yield f"foreign {key} {value}", {**few, key: value}
            yield f"foreign {key} null", {**few, key: None}
    for part in [key for key, value in few.items() if isinstance(value, dict) and not key.startswith("rope_")]:
        for key, value in every[part].items():
            if key in INERT or key == "rope_theta":
                continue
            less = {each: value for each, value in few[part].items() if each != key}
            yield f"{part}.{key} left out", {**few, part: less}
            for other in (None, *others_of(value)):
                yield f"{part}.{key} {other}", {**few, part: {**few[part], key: other}}
    yield from positions(few)
