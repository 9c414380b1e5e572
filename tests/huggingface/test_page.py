"""Every MoE decoder of the installed transformers is imported, or has a reason; docs/huggingface.md lists them all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from huggingface.equal import DiagnosticError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import moec
from moec.grammar.huggingface.around import AROUND, DECODERS
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.kept_out import AROUND_KEPT_OUT, KEPT_OUT, PARTLY

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
MARK = "<!-- generated -->\n"
OF_EXPERTS = re.compile("expert|moe|router", re.IGNORECASE)
UNMADE = {"gemma4_assistant", "nougat"}
"""Types whose class makes no config without values. Neither has experts."""


def keys_of(values: Mapping[Any, Any]) -> Iterator[str]:
    """The keys of a config and of those inside of it."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from keys_of(value)


@cache
def with_experts() -> dict[str, PreTrainedConfig]:
    """The default config of every model type with a key of experts."""
    found = {}
    for model_type in CONFIG_MAPPING_NAMES:
        if model_type not in UNMADE:
            config = CONFIG_MAPPING[model_type]()
            if any(map(OF_EXPERTS.search, keys_of(config.to_dict()))):
                found[model_type] = config
    return found


def decoders() -> list[str]:
    """The model types with experts and a vocabulary of their own: decoders, and the text parts of other models."""
    return sorted(model_type for model_type, config in with_experts().items() if hasattr(config, "vocab_size"))


def around_decoders() -> dict[str, str]:
    """The model types that have a decoder with experts inside → the decoder's type."""
    found = {}
    for model_type, config in with_experts().items():
        text = config.get_text_config(decoder=True)
        if text is not config and text.model_type in decoders() and model_type not in decoders():
            found[model_type] = text.model_type
    return dict(sorted(found.items()))


def test_the_list_has_what_it_must() -> None:
    """Of the criterion: well-known decoders of every naming are in it, dense ones are not."""
    known = {"mixtral", "dbrx", "jamba", "jetmoe", "llama4_text", "switch_transformers", "nllb-moe", "longcat_flash"}
    assert known <= set(decoders())
    assert not {"llama", "qwen3", "gemma3_text", "vitpose_backbone", "clip"} & set(decoders())
    assert around_decoders()["llama4"] == "llama4_text"


def test_every_decoder_is_imported_or_has_a_reason() -> None:
    assert set(decoders()) - set(BY_TYPE) - set(KEPT_OUT) - set(DECODERS) == set()


def test_reasons_are_for_decoders_that_are_not_imported() -> None:
    assert set(KEPT_OUT) - set(decoders()) == set()
    assert set(KEPT_OUT) & set(BY_TYPE) == set()
    assert set(DECODERS) & (set(KEPT_OUT) | set(BY_TYPE)) == set()
    assert set(PARTLY) - set(BY_TYPE) == set()
    assert around_decoders().items() >= AROUND_KEPT_OUT.items()
    assert around_decoders().keys() == AROUND_KEPT_OUT.keys() | AROUND.keys() - {"mistral3"}


@pytest.mark.parametrize("model_type", sorted(KEPT_OUT))
def test_users_are_told_the_reason(model_type: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        moec.from_hf({"model_type": model_type})
    (found,) = caught.value.diagnostics
    assert found.code == "MOE0901"
    assert KEPT_OUT[model_type] in str(found.message)


def test_keys_that_reasons_name_are_keys_of_the_config() -> None:
    """A reason that names a key or module is about this type: its config or its code has the word."""
    for model_type, reason in {**KEPT_OUT, **PARTLY}.items():
        folder = Path(__import__(CONFIG_MAPPING[model_type].__module__, fromlist=["_"]).__file__).parent
        code = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
        for word in re.findall(r"`(\w+)`", reason):
            if word not in ("output_gate",):
                assert word in code, f"{model_type}: {word}"


def test_the_page_is_current(update_golden: bool) -> None:
    written, mark, generated = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    if update_golden:
        PAGE.write_text(f"{written}{MARK}{page()}", encoding="utf-8")
    else:
        assert generated == page(), "run the tests with --update-golden"


def page() -> str:
    """The tables."""
    lines = ["", "| `model_type` | state |", "|---|---|"]
    lines += [f"| `{model_type}` | {state(model_type)} |" for model_type in sorted({*decoders(), *BY_TYPE})]
    lines += ["", "| `model_type` of a model around a decoder | its decoder | state |", "|---|---|---|"]
    for model_type, decoder in around_decoders().items():
        lines.append(f"| `{model_type}` | `{decoder}` | {state_around(model_type)} |")
    lines.append("| `mistral3` | `mistral4` or `mistral` | its decoder, as these |")
    return "\n".join([*lines, ""])


def state_around(model_type: str) -> str:
    """Of a model with a decoder inside, by the defaults of its class."""
    if model_type not in AROUND:
        return "not imported"
    usual = AROUND[model_type][0]
    family = DECODERS[usual].family if usual in DECODERS else usual
    assert family in BY_TYPE
    return f"its decoder, as `{family}`"


def state(model_type: str) -> str:
    if model_type in DECODERS:
        return f"equal, as `{DECODERS[model_type].family}`"
    if model_type in KEPT_OUT:
        return f"not imported: {KEPT_OUT[model_type]}"
    assert model_type in BY_TYPE, model_type
    return f"equal for {PARTLY[model_type]}" if model_type in PARTLY else "equal"
