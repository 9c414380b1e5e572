"""The families that moec knows, by `model_type`."""

from __future__ import annotations

from moec.grammar.huggingface.families import deepseek, dense, gpt_oss, granite, mixtral, others, qwen
from moec.grammar.huggingface.family import Family

BY_TYPE: dict[str, Family] = {
    family.model_type: family
    for module in (mixtral, qwen, deepseek, gpt_oss, granite, others, dense)
    for family in module.FAMILIES
}
