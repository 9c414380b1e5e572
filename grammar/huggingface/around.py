"""Finds the decoder in the config of a model of images and text, and the decoder's own architecture.

With tokens alone, these models compute the same as their decoder; towers for images are not imported. Positions of
images (`mrope_section`) are those of a text where there is no image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moec.grammar.huggingface.config import Config

TEXT, TIED = "text_config", "tie_word_embeddings"
IMAGES = "mrope_section", "mrope_interleaved", "interleaved"
"""Keys of positions without a meaning for tokens alone."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A `model_type` that is another family's under a second name: the keys that its class fills in, and fixed ones."""

    family: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


DECODERS: dict[str, Decoder] = {
    "qwen3_vl_moe_text": Decoder(
        "qwen3_moe",
        {"num_key_value_heads": 16, "rope_theta": 5e5, "head_dim": None, "tie_word_embeddings": True},
        {"norm_topk_prob": True, "use_sliding_window": False},
    ),
    "glm4v_moe_text": Decoder("glm4_moe", {"attention_bias": True}, {"use_qk_norm": False}),
}
"""Decoders that are saved as another architecture, for they have none of their own."""

AROUND: dict[str, tuple[str, bool]] = {
    "aria": ("aria_text", False),
    "glm4v_moe": ("glm4v_moe_text", False),
    "kimi_k25": ("deepseek_v3", True),
    "mistral3": ("mistral", True),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", False),
}
"""`model_type` → that of its decoder, where the config leaves it out; whether embeddings are tied by default."""
EITHER = "glm4v_moe"
"""Embeddings are tied if either the config or its decoder's says so; elsewhere the decoder's has no effect."""


def decoder_config(config: Config) -> Config:
    """The config of the decoder: `config` itself or its `text_config`, with the keys of a family."""
    word = config.values.get("model_type")
    around = AROUND.get(word) if isinstance(word, str) else None
    if around is not None and isinstance(config.values.get(TEXT), Mapping):
        usual, tied = around
        text = dict(config.values[TEXT])
        if text.get("model_type") is None:
            text["model_type"] = usual
        inner, outer = text.get(TIED), config.values.get(TIED, tied)
        text[TIED] = outer or (word == EITHER and inner is True)
        for key in ("dtype", "torch_dtype"):
            if text.get(key) is None and config.values.get(key) is not None:
                text[key] = config.values[key]
        inside = config.inside(TEXT, _family_values(text))
        config.warn(TEXT, f"`{TEXT}` alone is imported: what `{word}` has beside its decoder has no word")
        inside.notes += config.notes
        return inside
    return config.replaced(_family_values(config.values))


def _family_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with the names and keys of the family that reads them."""
    word = values.get("model_type")
    decoder = DECODERS.get(word) if isinstance(word, str) else None
    if decoder is None:
        return values
    changed = {**decoder.defaults, **values, **decoder.fixed, "model_type": decoder.family}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(changed.get(key), Mapping):
            changed[key] = _text_positions(changed[key])
    return changed


def _text_positions(positions: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in positions.items() if key not in IMAGES}
    return kept | {key: "default" for key in ("rope_type", "type") if kept.get(key) == "mrope"}
