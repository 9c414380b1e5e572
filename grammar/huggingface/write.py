"""A `Spec` as a `config.json` that transformers loads. Needs neither torch nor transformers.

A family's reader is its only description. It reads the keys of a model (`keys.py`, and the family's own) again; the
keys that it has read are the config, if they give back the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moec.grammar.diagnostics import DiagnosticError, diagnose
from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.keys import NULLABLE, keys_of
from moec.grammar.huggingface.read import DOCS
from moec.grammar.spec import DType, Experts, Moa, Model, Moe, Online, Spec, Switch, TokenEmbedding, TopK
from moec.grammar.spec.base import Node, field_names
from moec.grammar.suggest import advice


def config_for(spec: Spec, model_type: str | None = None) -> tuple[dict[str, Any], Family]:
    """The config of a Spec's model, as `model_type`, or as the one of the name of the model, or the first that fits.

    What acts in training alone (balance terms, noise of gates) is left out. A model without `context` gets the sequence
    of `train`. Raises `DiagnosticError` MOE0908 for a model that no family, or not this one, can say, and MOE0901 for a
    type that moec does not know.
    """
    if not spec.has_model or not isinstance(spec.model.embedding, TokenEmbedding):
        what = "a layer" if not spec.has_model else "a model of images"
        raise DiagnosticError([diagnose("MOE0908", None, f"{spec.subject.name} is {what}, and no decoder")])
    if model_type is not None and model_type not in BY_TYPE:
        raise DiagnosticError(
            [diagnose("MOE0901", None, f'`model_type` is "{model_type}"', help=advice(model_type, BY_TYPE))]
        )
    model = spec.model
    if model.context is None and spec.train is not None:  # as generation does
        model = model.replace(context=spec.train.sequence)
    wanted = [BY_TYPE[model_type]] if model_type else sorted(
        BY_TYPE.values(), key=lambda family: family.model_type != model.name
    )  # fmt: skip
    reasons = {}
    for family in wanted:
        config, reasons[family.model_type] = _written(family, model)
        if config is not None:
            return config, family
    if model.name in reasons or model_type:
        name = model_type or model.name
        message = f"{model.name} is no `{name}`: {reasons[name]}"
        help = ROUNDED if reasons[name].startswith("`keep_in_fp32`") else DOCS
    else:
        message, help = f"no architecture that moec knows computes what {model.name} does", DOCS
    raise DiagnosticError([diagnose("MOE0908", None, message, help=help)])


ROUNDED = "transformers would round these: `moec weights export` with a plan that rounds them writes a checkpoint so"


def _written(family: Family, model: Model) -> tuple[dict[str, Any] | None, str]:
    """The config; or None, and why the family cannot express the model."""
    keys = {**keys_of(model), **family.keys(model), "model_type": family.model_type}
    keys = {key: value for key, value in keys.items() if value is not None or key in NULLABLE}
    config = Config(keys)
    try:
        again = family.model_of(config)
        config.require_sound()
    except DiagnosticError as error:
        return None, error.diagnostics[0].message
    except (ValueError, ArithmeticError) as error:
        return None, str(error).splitlines()[0]
    wanted, kept = as_inferred(model), as_inferred(again).keep_in_fp32
    # transformers may keep more in fp32: moec writes what it rounds in bf16, and widening changes no number.
    again = again.replace(keep_in_fp32=wanted.keep_in_fp32) if {*wanted.keep_in_fp32} <= {*kept} else again
    different = next(differences(wanted, as_inferred(again)), None)
    if different is not None:
        return None, different
    asked = {key: value for key, value in keys.items() if key in config.asked or key == "model_type"}
    # Left out, they would be those of the architecture's vocabulary.
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": getattr(model.embedding, "padding_id", None)}
    return {"architectures": [family.architecture], **ids, **asked}, ""


def as_inferred(model: Model) -> Model:
    """The model without what acts in training alone, what no config states (`router_dtype`), and its name."""
    layers = {}
    for layer in model.layers:
        if id(layer) not in layers:
            moe = layer.moe
            attention = layer.attention
            if isinstance(attention, Moa) and attention.balance:
                attention = attention.replace(balance=())
            if moe is not None:
                moe = moe.replace(balance=(), gate=_inferred_gate(moe.gate), group=Moe.group)
            layers[id(layer)] = layer.replace(attention=attention, moe=moe)
    embedding = model.embedding
    assert isinstance(embedding, TokenEmbedding)
    kept = ("tied", "positions", "multiplier", "logits_multiplier", "logits_bias")
    embedding = TokenEmbedding(**{name: getattr(embedding, name) for name in kept if hasattr(embedding, name)})
    in_fp32 = () if model.dtype is DType.FP32 else model.keep_in_fp32
    layers_of = tuple(layers[id(layer)] for layer in model.layers)
    return model.replace(layers=layers_of, embedding=embedding, keep_in_fp32=in_fp32, router_dtype="fp32")


def _inferred_gate(gate: Node) -> Node:
    """A gate without noise, and with the usual rate of an online bias. Sparsemixer's jitter acts in evaluation too."""
    if isinstance(gate, Switch):
        return TopK(k=1)
    if isinstance(gate, TopK):
        bias = Online() if isinstance(gate.bias, Online) else gate.bias
        keep = None if gate.keep_groups == gate.groups else gate.keep_groups
        groups = 1 if keep is None else gate.groups
        score = gate.group_score if groups > 1 else "top2_sum"
        gate = gate.replace(jitter=0.0, noise=0.0, bias=bias, keep_groups=keep, groups=groups, group_score=score)
        if gate.order == "after" and gate.score == "softmax":
            gate = gate.replace(normalize=False)
        if gate.order == "before" and gate.score == "softmax" and gate.normalize and gate.bias == "none":
            gate = gate.replace(order="after", normalize=False)  # the softmax of the best is the best's, renormalised
    return gate


def differences(one: Node, other: Node, path: str = "") -> Iterator[str]:
    """What differs between two nodes, as `layers.3.attention.window is 7, and would be read as none`."""
    if type(one) is not type(other):
        yield f"`{path or 'it'}` is {one.word}, and would be read as {other.word}"
        return
    for name in field_names(type(one)):
        if not path and name == "name":
            continue
        here, there = getattr(one, name), getattr(other, name)
        inside = f"{path}.{name}" if path else name
        if here == there:
            continue
        if isinstance(here, Node) and isinstance(there, Node):
            yield from differences(here, there, inside)
        elif _is_of_nodes(here) and _is_of_nodes(there):
            if len(here) != len(there) and inside != "layers":  # `depth` says it
                yield f"`{inside}` is a list of {len(here)}, and would be read as a list of {len(there)}"
            for number, (left, right) in enumerate(zip(here, there, strict=False)):
                if isinstance(left, Node) and isinstance(right, Node):
                    yield from differences(left, right, f"{inside}.{number}")
                elif left != right:
                    yield f"`{inside}.{number}` is {left}, and would be read as {right}"
        elif isinstance(here, float) and isinstance(there, float) and abs(here - there) <= 1e-12 * abs(here):
            continue
        else:
            yield f"`{inside}` is {_shown(here)}, and would be read as {_shown(there)}"


def _is_of_nodes(value: object) -> bool:
    return isinstance(value, tuple) and not all(isinstance(element, str) for element in value)


def _shown(value: object) -> str:
    if isinstance(value, Experts):
        return f"{value.count} experts"
    if isinstance(value, Moe):
        return "a mixture"
    if isinstance(value, tuple) and all(isinstance(element, str) for element in value):
        return f"[{', '.join(value)}]"
    if isinstance(value, Mapping | tuple):
        return f"a list of {len(value)}"
    return "none" if value is None else value.word if isinstance(value, Node) else str(value)
