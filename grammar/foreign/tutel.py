"""Names of Tutel's `tutel.moe.moe_layer`, of its `gate_type` and `experts` dictionaries, and of its `forward`."""

from __future__ import annotations

from moec.grammar.foreign.row import CAPACITY, GATE, MOE, SWITCH_LOSS, Row, off

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_LAYER = "impls/moe_layer.py, MOELayer.forward"
_CRITICAL = "impls/fast_dispatch.py, extract_critical"
_EXPERTS = "experts/ffn.py, FusedExpertsNetwork"
_LOSSES = "impls/losses.py, load_importance_loss"
_RANK = "counted over a rank's tokens of a call: `group = rank` is a further line of `moe`"
_ROUNDED = "FACTOR is int({} * ceil(tokens / experts)) * experts / tokens for a rank's tokens: Tutel rounds before it multiplies by k"
_LOADS = "`gate = topk(2, normalize = true, noise = 0.125); balance = [importance_loss(WEIGHT, of = all), load_loss(WEIGHT, of = probabilities)]`, where WEIGHT is half of theirs times E / (E - 1): Tutel's variances divide by E - 1, ours by E"

ROWS: tuple[Row, ...] = (
    Row("hidden_size_per_expert", f"{MOE}.experts.relu.hidden", "experts = 16 * relu({}, bias = true)", "16_384", "`activation_fn` is the word of the call, relu by default; without `has_fc1_bias` and `has_fc2_bias`, both true by default, leave `bias` out", _EXPERTS, "with its defaults", (("with `activation_fn = F.gelu`", "experts = 16 * gelu({}, bias = true)"),)),
    Row("activation_fn", f"{MOE}.experts", "experts = 16 * relu(16_384, bias = true)", "", "`gelu`, `relu2`, `silu` are the words for others", _EXPERTS, "left out"),
    Row("has_fc1_bias has_fc2_bias", f"{MOE}.experts.relu.bias", "experts = 16 * relu(16_384, bias = true)", "", "for both true, the default; one alone has no equal", _EXPERTS, renames=False, but=off()),
    Row("gate_type", f"{MOE}.gate", "gate = topk(2, normalize = true)", "", "for k = 1 `topk(1)`; `cosine_top` has no equal", f"{_LAYER}; gates/top.py, LinearTopKGate", "for `{'type': 'top', 'k': 2}`"),
    Row("normalize_gate", f"{GATE}.normalize", "gate = topk(2, normalize = {})", "true", "true by default there", _CRITICAL, "for k >= 2", (("for k = 1, where it has no effect", "gate = topk(1)"),), renames=False),
    Row("gate_noise", f"{GATE}.noise", "gate = topk(2, normalize = true, noise = 0.125)", "", "Tutel's number divided by the number of experts: for 1.0 and 8 experts; it chooses and weighs, in training, in both", _LAYER, renames=False, but=off()),
    Row("batch_prioritized_routing", f"{CAPACITY}.order", "capacity = factor(1.25, order = priority)", "", "beside `gate = topk(2, normalize = true)`: `gate = batch_priority(2)` does not divide weights by their sum, as `normalize_gate` does", _CRITICAL, but=off()),
    Row("capacity_factor", f"{CAPACITY}.factor", "capacity = factor(FACTOR)", "1.25", f"{_ROUNDED}; {_RANK}; left out it is 1.0; 0 is `dynamic()`, a negative number `dynamic(max = …)`", _CRITICAL, renames=False, but=dict.fromkeys(("0", "0.0"), "write `capacity = dynamic()`")),
    Row("is_gshard_loss", f"{MOE}.balance", "balance = [gshard_loss(0.01)]", "", f"`l_aux` has no weight there, {_RANK}; for false it is {_LOADS}", "impls/losses.py, gshard_loss", "for true, the default", but={"false": f"write {_LOADS}"}),
    Row("l_aux", f"{MOE}.balance", "balance = [gshard_loss(0.01)]", "", f"it has no weight there, {_RANK}; with `is_gshard_loss = False` it is {_LOADS}", f"impls/losses.py, gshard_loss; {_LOSSES}", "with `is_gshard_loss`, the default"),
    Row("l_aux_wt", SWITCH_LOSS, "balance = [gshard_loss({})]", "0.01", f"the factor of Tutel's examples on `l_aux`, {_RANK}", "impls/losses.py, gshard_loss", "with `is_gshard_loss`, the default", renames=False, but=off()),
    Row("fp32_gate", "model.router_dtype", "router_dtype = fp32", "", "the default here; False, their default, is `router_dtype = model`", "gates/top.py, LinearTopKGate"),
    Row("is_postscore", "", "", "", "leave it out: weights multiply what experts return, as with their default. With `False` they multiply what experts get, which has no equal", "impls/fast_dispatch.py, TutelMoeFastDispatcher"),
    Row("output_dim", "", "", "", "no equal: an expert's result is as wide as the model", _EXPERTS),
    Row("use_2dh", "adapt.all_to_all", "adapt { all_to_all = hierarchical }", "", "not supported yet", but=off()),
    Row("a2a_ffn_overlap_degree", "adapt.overlap", "adapt { overlap = {} }", "2", "not supported yet"),
    Row("parallel_type adaptive_r", "adapt.parallelism", "adapt { parallelism = {} }", "1", "not supported yet"),
    Row("inequivalent_tokens", "", "", "", "leave it out: ranks may have different numbers of tokens where nothing is counted over a rank"),
    Row("seeds", "", "", "", "one `seed` of `job.build` or `moec.layer`, for any number of ranks"),
    Row("result_func scan_expert_func", "", "", "", "`ffn.aux_loss` and `ffn.expert_parameters()` of a layer"),
)
