"""Names of FastMoE's `FMoE`, `FMoETransformerMLP`, of its gates and of its patch for Megatron."""

from __future__ import annotations

from moec.grammar.foreign.row import CAPACITY, GATE, MOE, Row, off

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_NAIVE = "gates/naive_gate.py, NaiveGate.forward"
_SWITCH = "gates/switch_gate.py, SwitchGate.forward"
_GSHARD = "gates/gshard_gate.py, GShardGate.forward"
_NOISY = "gates/noisy_gate.py, NoisyGate.forward"
_MLP = "transformer.py, FMoETransformerMLP"
_SWITCH_DIFFERS = "no equal; nearest is `gate = topk(1, bias = learned)`: FastMoE adds uniform noise to the logits, and its term counts the choices that were kept"
_GSHARD_DIFFERS = "no equal; nearest is `gate = topk(2, order = after, bias = learned)`: FastMoE drops second choices at random, in evaluation too, and `gate = gshard()` has no bias"
_NOISY_DIFFERS = "no equal; nearest is `gate = noisy_topk(2)`: FastMoE adds 0.01 to the noise's deviation, and its terms have other variances and no weight"

ROWS: tuple[Row, ...] = (
    Row("top_k", f"{GATE}.k", "gate = topk({}, order = after, bias = learned)", "2", "the softmax of the chosen logits, whose gate has a bias unless `gate_bias = False`", _NAIVE, "with `NaiveGate`, the default", renames=False),
    Row("gate_bias", f"{GATE}.bias", "gate = topk(2, order = after, bias = learned)", "", "the default there", _NAIVE, renames=False, but=off("write `gate = topk(2, order = after)`, without a bias")),
    Row("gate", f"{MOE}.gate", "gate = topk(2, order = after, bias = learned)", "", f"for `SwitchGate` {_SWITCH_DIFFERS}. For `GShardGate` {_GSHARD_DIFFERS}. For `NoisyGate` {_NOISY_DIFFERS}", f"{_NAIVE}; {_SWITCH}; {_GSHARD}; {_NOISY}", "for `NaiveGate`, the default"),
    Row("balance_strategy", f"{MOE}.gate", "gate = topk(2, order = after, bias = learned)", "", "it chooses the gate; the others have no equal", "megatron/layers.py, MegatronMLP", "for `naive`", but=off("write `gate = topk(2, order = after, bias = learned)`: that is FastMoE's `NaiveGate`") | {"naive": "write `gate = topk(2, order = after, bias = learned)`", "switch": _SWITCH_DIFFERS, "gshard": _GSHARD_DIFFERS, "noisy": _NOISY_DIFFERS, "swipe": "no equal: moec has no gate that swaps experts until loads are equal; `gate = base()` is nearest"}),
    Row("d_hidden hidden_hidden_size", f"{MOE}.experts.gelu.hidden", "experts = 8 * gelu({}, bias = true)", "14_336", "`activation` is the word of the call, the exact gelu by default; experts have biases", _MLP),
    Row("switch_eps", f"{GATE}.noise", "gate = topk(1, bias = learned)", "", "", _SWITCH, differs="noise there is uniform, in 1 ± this, and is added to the logits in training", renames=False),
    Row("random_routing", f"{MOE}.gate", "gate = topk(2, order = after, bias = learned)", "", "`gate = gshard()` draws in training alone", _GSHARD, differs="FastMoE drops the second choice at random unless it is false, in evaluation too"),
    Row("capacity", f"{CAPACITY}.factor", "capacity = factor(1.2, eval = 2.4)", "", "the two numbers are those of training and evaluation, over a rank's tokens: `group = rank`", f"{_SWITCH}; {_GSHARD}", "for `SwitchGate` on one worker", differs="on several workers `SwitchGate` divides by one worker's experts, and `GShardGate` rounds down"),
)
