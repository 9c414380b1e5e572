"""Names of torchtitan's configurations. Some are of earlier versions: `seq_len`, `moe_inter_dim`, `n_limited_groups`."""

from __future__ import annotations

from moec.grammar.foreign.row import ADAMW, ATTENTION, GATE, GQA, MLA, MLA_FORM, MOE, ROPE, Row, off

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_ROUTER = "models/common/moe.py, TokenChoiceTopKRouter.forward"
_GROUPS = "models/common/moe.py, TokenChoiceTopKRouter._get_node_limited_routing_scores"
_EXPERTS = "models/common/moe.py, GroupedExperts.forward"
_ROPE = "models/common/rope.py, ComplexRoPE and CosSinRoPE"
_SOFTMAX = "with `score_func = softmax`, as Qwen3 and gpt-oss have"
_PAIRS = "Llama 3 and DeepSeek-V3 turn neighbours, `interleaved = true`; Qwen3 and gpt-oss do not"
_BALANCED = "`load_balance_coeff`, 1e-3 unless told, is a bias too: `bias = online(1e-3)`"

ROWS: tuple[Row, ...] = (
    Row("norm_eps", "model.norm.rms.eps", "norm = rms(eps = {})", "1e-5", "", "models/common/nn_modules.py, RMSNorm"),
    Row("n_heads", f"{ATTENTION}.mha.heads", "attention = mha(heads = {}, rope = rope(interleaved = true))", "32", f"with fewer key and value heads, both numbers go into one `gqa`; {_PAIRS}", _ROPE),
    Row("n_kv_heads", f"{GQA}.kv_heads", "attention = gqa(heads = 32, kv_heads = {}, rope = rope(interleaved = true))", "8", f"`heads` is your number of attention heads; {_PAIRS}", _ROPE),
    Row("rope_theta", f"{ROPE}.theta", "rope = rope(theta = {}, interleaved = true)", "1e6", _PAIRS, _ROPE, "in Llama 3 and DeepSeek-V3", (("in Qwen3 and gpt-oss", "rope = rope(theta = {})"),)),
    Row("q_lora_rank", f"{MLA}.q_rank", MLA_FORM.replace("kv_rank", "q_rank = {}, kv_rank"), "1536", "", "models/deepseek_v3/model.py, Attention", but=off()),
    Row("kv_lora_rank", f"{MLA}.kv_rank", MLA_FORM.replace("512", "{}"), "512", "", "models/deepseek_v3/model.py, Attention"),
    Row("qk_nope_head_dim", f"{MLA}.nope_dim", MLA_FORM.replace("nope_dim = 128", "nope_dim = {}"), "128", "", "models/deepseek_v3/model.py, Attention"),
    Row("qk_rope_head_dim", f"{MLA}.rope_dim", MLA_FORM.replace("64", "{}"), "64", "", "models/deepseek_v3/model.py, Attention"),
    Row("v_head_dim", f"{MLA}.value_dim", MLA_FORM.replace("value_dim = 128", "value_dim = {}"), "128", "", "models/deepseek_v3/model.py, Attention"),
    Row("hidden_dim inter_dim", "model.layers.ffn.swiglu.hidden", "ffn = swiglu({})", "14_336", "of `GroupedExperts` it is `experts = 8 * swiglu({})`", "models/common/feed_forward.py, FeedForward"),
    Row("moe_hidden_dim moe_inter_dim", f"{MOE}.experts.swiglu.hidden", "experts = 8 * swiglu({})", "14_336", "`swiglu` has the gate first in both", _EXPERTS),
    Row("num_shared_experts shared_experts", f"{MOE}.shared", "shared = swiglu(2816)", "", "WIDTH is the number of shared experts times the width of one; without a gate", "models/common/moe.py, MoE.forward", but=off()),
    Row("n_dense_layers", "model.layers.ffn", "layers 0..2 { ffn = swiglu(18_432) }", "", "that is the first three layers; a later `layers` block replaces what it names", "models/deepseek_v3/__init__.py", but=off()),
    Row("top_k router_top_k", f"{GATE}.k", "gate = topk({}, score = sigmoid)", "2", f"weights are not divided by their sum unless `route_norm`; {_BALANCED}", _ROUTER, "with its defaults", ((_SOFTMAX + ", and `route_norm`", "gate = topk({}, normalize = true)"),), renames=False),
    Row("score_func", f"{GATE}.score", "gate = topk(2, score = {})", "sigmoid", "`sigmoid` is their default, `softmax` ours", _ROUTER),
    Row("route_norm", f"{GATE}.normalize", "gate = topk(2, score = sigmoid, normalize = {})", "true", "false is their default", _ROUTER),
    Row("route_scale", f"{GATE}.scale", "gate = topk(2, score = sigmoid, scale = {})", "2.5", "", _ROUTER),
    Row("num_expert_groups n_expert_groups", f"{GATE}.groups", "gate = topk(8, score = sigmoid, groups = {}, keep_groups = 4)", "8", "a group is ranked by the sum of its two best, biases included, in both", _GROUPS, but=off()),
    Row("num_limited_groups n_limited_groups", f"{GATE}.keep_groups", "gate = topk(8, score = sigmoid, groups = 8, keep_groups = {})", "4", "a group is ranked by the sum of its two best, biases included, in both", _GROUPS, but=off()),
    Row("load_balance_coeff", f"{GATE}.bias.online.rate", "gate = topk(8, score = sigmoid, bias = online({}))", "1e-3", "1e-3 unless told. torchtitan also takes the mean off each update, which changes no choice", "components/optimizer/optimizer.py, _update_expert_bias", but=off()),
    Row("init_std", "", "", "", "new weights have a standard deviation of 0.02, outputs into the residual stream 0.02 / sqrt(2 * depth); other values are loaded, or set in the training script", "models/common/param_init.py"),
    Row("num_tokens_per_microbatch_per_dp_rank", "parallel.microbatches", "microbatches = 4", "", "a number of micro-batches here, not of tokens: a data-parallel rank's part of `batch` times `sequence`, divided by it"),
    Row("num_tokens_per_train_step", "train.batch", "batch = 1024", "", "it is `batch` times `sequence`"),
    Row("lr", f"{ADAMW}.lr", "optimizer = adamw(lr = {})", "3e-4", "its other numbers are stated per group of parameters there", "components/optimizer/optimizer.py, default_adamw"),
)
