"""The balance term of a config in words of the language. An import does not write it, but notes it for the user."""

from __future__ import annotations

from moec.grammar.huggingface.config import Config
from moec.grammar.spec import Model, TopK
from moec.grammar.units import written

COEFFICIENT = "router_aux_loss_coef"


def note_balance(config: Config, model: Model) -> None:
    """Warns of a loss that the model has in transformers, with `output_router_logits`, and not yet here."""
    coefficient = config.values.get(COEFFICIENT)
    if config.values.get("output_router_logits") is not True or not isinstance(coefficient, int | float):
        return
    if coefficient:
        config.note(COEFFICIENT, _equal_of(float(coefficient), model))


def _equal_of(coefficient: float, model: Model) -> str:
    """The equal term, for a gate whose choices are the best k of a softmax, as the loss of transformers assumes.

    transformers 5.24.0, `models/mixtral/modeling_mixtral.py`, `load_balancing_loss_func`: each of the k choices counts
    in full, so theirs is k times `switch_loss`, over the tokens of all layers.
    """
    mixtures = [layer.moe for layer in model.layers if layer.moe is not None]
    choices = {moe.gate.k for moe in mixtures if isinstance(moe.gate, TopK) and _is_plain(moe.gate)}
    if len(choices) != 1 or any(not (isinstance(moe.gate, TopK) and _is_plain(moe.gate)) for moe in mixtures):
        return "write a balance term of moec's: none is over this gate's logits as transformers' is"
    (k,) = choices
    layers = f"all {len(mixtures)} layers" if len(mixtures) > 1 else "the layer"
    term = f"switch_loss({_written(coefficient * k)}, over = model)"
    return (
        f"write `balance = [{term}]` and `group = batch` in `moe`, which is that term: {_written(coefficient)} times "
        f"k = {k}, over the tokens of {layers}"
    )


def _written(number: float) -> str:
    """As configs write it, `0.008`, without the last digits of a product's rounding."""
    text = f"{number:.12g}"
    return written(float(text), "") if "e" in text else text


def _is_plain(gate: TopK) -> bool:
    return gate.score == "softmax" and gate.keep_groups in (None, gate.groups) and gate.bias in ("none", "learned")
