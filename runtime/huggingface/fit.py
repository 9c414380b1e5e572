"""Checks that stored tensors are exactly those of a model, before any is copied, and reports all faults at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.rules import Rule
from moec.runtime.huggingface.quantised import quantised
from moec.runtime.huggingface.source_tensors import SourceTensor

READABLE = torch.float32, torch.bfloat16, torch.float16
"""Dtypes whose values fp32 represents exactly."""
MAX_NAMED = 5
INERT = r".*rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias", r".*\.num_batches_tracked"
"""Buffers that older versions of transformers saved although the config determines them."""


def require_fit(
    family: Family,
    rules: Sequence[Rule],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, SourceTensor],
    name: str,
    num_further_layers: int = 0,
) -> list[tuple[Rule, SourceTensor]]:
    """Each rule with its tensor, if there is one. `shapes`: those of the model's parameters; `name`: the source's.

    The source may have `num_further_layers` beyond the model's depth, which are omitted. Raises `DiagnosticError` with
    MOE0906 for tensors that are missing or that the model lacks, and MOE0907 for other shapes, for dtypes that are not
    16 or 32 bit floating point, and for a tensor that must equal another but does not.
    """
    fitting, missing, wrong = list[tuple[Rule, SourceTensor]](), list[str](), list[str]()
    help = HELP
    for rule in rules:
        tensor = stored.get(rule.name)
        if tensor is None:
            missing += [] if rule.optional else [rule.name]
            continue
        shape = rule.shape(shapes)
        if tensor.shape != shape:
            wrong.append(f"{rule.name} is {list(tensor.shape)} in {tensor.place}, {list(shape)} in the model")
            if tensor.shape[1:] == shape[1:] and rule.pieces[0].parameter in OF_TOKENS:
                help = ADDED_TOKENS
        elif tensor.dtype not in READABLE:
            wrong.append(f"{rule.name} is {str(tensor.dtype).removeprefix('torch.')} in {tensor.place}")
            help = DEQUANTISE
        elif rule.written:
            fitting.append((rule, tensor))
        elif unlike := _unlike_its_twin(rule, tensor, rules, stored):
            wrong.append(unlike)
    known = {rule.name for rule in rules}
    unused = re.compile("|".join((*INERT, *family.skipped)))
    extra = [
        name
        for name, tensor in stored.items()
        if name not in known and not unused.fullmatch(name) and 0 not in tensor.shape  # such as 0 shared experts
    ]
    if family.extra_layers:
        depth = max(_layer_of(name) for name in known) + 1
        extra = [name for name in extra if not depth <= _layer_of(name) < depth + num_further_layers]
    if (missing or extra or wrong) and (diagnostic := quantised(stored, name)):
        raise DiagnosticError([diagnostic])
    errors: list[Diagnostic] = []
    if missing:
        errors.append(diagnose("MOE0906", None, f"{name} has no {_list(missing)}", help=HELP))
    if extra:
        errors.append(diagnose("MOE0906", None, f"{name} has {_list(extra)}, which the model does not have", help=HELP))
    if wrong:
        errors.append(diagnose("MOE0907", None, _list(wrong), help=help))
    if errors:
        raise DiagnosticError(errors)
    return fitting


def _layer_of(name: str) -> int:
    """The number of the layer in a tensor's name; −1 if it has none."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _unlike_its_twin(
    rule: Rule, tensor: SourceTensor, rules: Sequence[Rule], stored: Mapping[str, SourceTensor]
) -> str:
    """A phrase if a tensor that should repeat another (the head, if embeddings are tied) differs from it; or empty."""
    twin = next(other_rule for other_rule in rules if other_rule.written and other_rule.pieces == rule.pieces)
    other = stored.get(twin.name)
    if other is None or (other.shape == tensor.shape and torch.equal(other.view(), tensor.view())):
        return ""
    return f"{rule.name} differs from {twin.name}, but the config ties them (`tie_word_embeddings`)"


OF_TOKENS = "embedding.weight", "head.weight", "head.bias"
DEQUANTISE = "dequantise a quantised checkpoint (int8, fp8, mxfp4) to bf16 first"
ADDED_TOKENS = (
    "for added tokens, `resize_token_embeddings` and `save_pretrained` of transformers make a folder with their rows: "
    "import that one (docs/huggingface.md#added-tokens)"
)
HELP = "load the weights that belong to the config from which the model was made (`moec.from_hf`)"


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{'; '.join(names[:MAX_NAMED])}{more}"
