"""The families that moec knows, by `model_type`."""

from __future__ import annotations

from moec.grammar.huggingface.families import (
    aria,
    dbrx,
    deepseek,
    dense,
    gpt_oss,
    granite,
    hybrids,
    mistral4,
    mixtral,
    others,
    qwen,
    scored,
)
from moec.grammar.huggingface.family import Family

BY_TYPE: dict[str, Family] = {
    family.model_type: family
    for module in (mixtral, qwen, deepseek, mistral4, gpt_oss, granite, dbrx, others, scored, aria, hybrids, dense)
    for family in module.FAMILIES
}
