"""Whether stored tensors are exactly those of a model: before anything is copied, and everything wrong at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.rules import Rule
from moec.runtime.huggingface.quantised import quantised
from moec.runtime.huggingface.stored import Stored

READABLE = torch.float32, torch.bfloat16, torch.float16
"""Dtypes of weights, each of which fp32 holds exactly."""
MOST_NAMED = 5
INERT = r".*rotary_emb\.inv_freq", r".*\.attn\.(masked_)?bias", r".*\.num_batches_tracked"
"""Buffers that older versions of transformers have saved, and that follow from the config."""


def require_fit(
    family: Family,
    rules: Sequence[Rule],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    name: str,
    further_layers: int = 0,
) -> list[tuple[Rule, Stored]]:
    """The tensor of each rule, where there is one. `shapes` are those of the model's parameters, `name` the source's.
    `further_layers`: so many layers beyond the model's depth may be there too, and are left out.

    Raises `DiagnosticError` with MOE0906 for tensors that are missing or have no place, and MOE0907 for other shapes,
    for dtypes that are no floating point numbers of 16 or 32 bits, and for a tensor that must equal another.
    """
    found, missing, wrong = list[tuple[Rule, Stored]](), list[str](), list[str]()
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
            found.append((rule, tensor))
        elif unlike := _unlike_its_twin(rule, tensor, rules, stored):
            wrong.append(unlike)
    known = {rule.name for rule in rules}
    unused = re.compile("|".join((*INERT, *family.skipped)))
    extra = [
        name
        for name, tensor in stored.items()
        if name not in known and not unused.fullmatch(name) and 0 not in tensor.shape  # of no shared experts
    ]
    if family.extra_layers:
        depth = max(_layer_of(name) for name in known) + 1
        extra = [name for name in extra if not depth <= _layer_of(name) < depth + further_layers]
    if (missing or extra or wrong) and (found_quantised := quantised(stored, name)):
        raise DiagnosticError([found_quantised])
    errors: list[Diagnostic] = []
    if missing:
        errors.append(diagnose("MOE0906", None, f"{name} has no {_list(missing)}", help=HELP))
    if extra:
        errors.append(diagnose("MOE0906", None, f"{name} has {_list(extra)}, which the model does not have", help=HELP))
    if wrong:
        errors.append(diagnose("MOE0907", None, _list(wrong), help=help))
    if errors:
        raise DiagnosticError(errors)
    return found


def _layer_of(name: str) -> int:
    """The number of the layer in a tensor's name, −1 for tensors of none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _unlike_its_twin(rule: Rule, tensor: Stored, rules: Sequence[Rule], stored: Mapping[str, Stored]) -> str:
    """What is wrong with a tensor that repeats another (the head, where embeddings are tied), or nothing."""
    twin = next(each for each in rules if each.written and each.pieces == rule.pieces)
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
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{'; '.join(names[:MOST_NAMED])}{more}"
