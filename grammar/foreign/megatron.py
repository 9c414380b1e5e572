"""Names of Megatron-LM's command line, and of Megatron Core's configurations where no flag has them."""

from __future__ import annotations

from moec.grammar.foreign.row import (
    ADAMW,
    ATTENTION,
    CAPACITY,
    GATE,
    GQA,
    MLA,
    MLA_FORM,
    MOE,
    ROPE,
    SWITCH_LOSS,
    Row,
    off,
)

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_TOPK = "core/transformer/moe/moe_utils.py, topk_routing_with_score_function"
_GROUPS = "core/transformer/moe/moe_utils.py, group_limited_topk"
_DROPS = "core/transformer/moe/moe_utils.py, apply_router_token_dropping"
_AUX = "core/transformer/moe/moe_utils.py, switch_load_balancing_loss_func and compute_routing_scores_for_aux_loss"
_BIAS = "core/transformer/moe/moe_utils.py, get_updated_expert_bias"
_CONFIG = "training/argument_utils.py, core_transformer_config_from_args"
_ACTIVATION = "core/transformer/mlp.py, MLP.forward"
_FLAGS = "training/arguments.py, _add_network_size_args"
_ROPE = "core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding"
_MLA = "core/transformer/multi_latent_attention.py, MultiLatentAttention"
_YARN = "core/models/common/embeddings/yarn_rotary_pos_embedding.py, YarnRotaryEmbedding"
_ARGUMENTS = "training/arguments.py, validate_args"
_OPTIMIZER = "core/optimizer/optimizer_config.py, OptimizerConfig; training/arguments.py, _add_regularization_args"
_RECOMPUTE = "core/transformer/transformer_config.py, TransformerConfig.recompute_modules"

_RANK = "counted over the tokens of a rank's micro-batch: `group = rank` is a further line of `moe`"
_PRE, _SIGMOID = "with `--moe-router-pre-softmax`", "with `--moe-router-score-function sigmoid` and k above 1"
_OF_SIGMOID = "gate = topk(8, score = sigmoid, normalize = true"
_RANKED = "a group is ranked by the sum of its k / keep_groups best: the default here where that is 2, `group_score = max` where it is 1, else there is no equal"
_PLAIN = "fractions there are of plain top-k: with expert biases or groups write `switch_loss(WEIGHT, fractions = scores)`"
_BY_WEIGHT = "each expert keeps the choices that it weighs most"
_BY_TOPK = "`torch.topk` of equal numbers says who keeps a place, in no order that torch promises: no equal for any k, and nearest is the default order"
_SEVERAL = f"{_BY_WEIGHT}, in both. With `position` {_BY_TOPK}"
_SHARD = f"places are {_RANK}; with tp or cp above 1 there of the tokens of one of these ranks, which has no equal"
_MLA_YARN = "by `rope_type = yarn`, whose `--rotary-scaling-factor` is 1 on the command line and changes nothing, and 40 in `MLATransformerConfig`: `scaling = yarn(40, original = 4096)`"
_SELECTIVE = "leave it out where the module is `core_attn`, the default: attention saves no scores here; for `--recompute-modules moe` or `moe_act` write `recompute = experts` in `parallel`"
_NO_DROPOUT = "moec has no dropout: leave it out. Megatron's default is 0.1: for equal numbers set it to 0 there"
_PADDED = "128 is `--make-vocab-size-divisible-by`; Megatron's softmax is over the padded rows too. `vocab = 50_304` for GPT-2's 50,257"
_BIASES = "the default here. Without the flag Megatron has biases in linears, attention and routers: `swiglu(14_336, bias = true)`, `gqa(…, bias = all)` and `gate = topk(2, order = after, bias = learned)`; its router biases begin as random normal numbers, ours as zeros"
_NEVER = "no equal: moec has neither sinkhorn nor quantile_balancing; nearest is `balance = [switch_loss(0.01)]`"

_MODEL = (
    Row("--vocab-size", "model.vocab", "vocab = 32_000", "", _PADDED, "training/vocab_utils.py, calculate_padded_vocab_size", "the number padded to a multiple of 128 times tp"),
    Row("--make-vocab-size-divisible-by", "", "", "", "moec pads no vocabulary: `vocab` is the number of rows of the embedding and of the head; write the padded number", "training/vocab_utils.py, calculate_padded_vocab_size"),
    Row("--norm-epsilon layernorm_epsilon", "model.norm.layer_norm.eps", "norm = layer_norm(eps = {})", "1e-5", "", "core/transformer/transformer_config.py, TransformerConfig.normalization", "with `--normalization LayerNorm`, the default", (("with `--normalization RMSNorm`", "norm = rms(eps = {})"),)),
    Row("--normalization", "model.norm", "norm = layer_norm(eps = 1e-5)", "", "", "core/transformer/transformer_config.py, TransformerConfig.normalization", "for `LayerNorm`, the default", (("for `RMSNorm`", "norm = rms(eps = 1e-5)"),), but={"rmsnorm": "write `norm = rms(eps = 1e-5)` in `model`", "layernorm": "write `norm = layer_norm(eps = 1e-5)` in `model`"}),
    Row("--apply-layernorm-1p layernorm_zero_centered_gamma", "", "", "", "leave it out: the numbers are the same. Megatron keeps norm weights minus 1, which matters where weights are loaded", "core/transformer/transformer_config.py, TransformerConfig.layernorm_zero_centered_gamma"),
    Row("--untie-embeddings-and-output-weights", "model.embedding.tokens.tied", "embedding = tokens(tied = false)", "", "untied is the default here; Megatron ties unless told", _FLAGS, but={"true": "leave it out: untied is the default here", "false": "write `embedding = tokens(tied = true)` in `model`"}),
    Row("--position-embedding-type", f"{GQA}.rope", "attention = gqa(heads = 32, kv_heads = 8, rope = rope())", "", "for `none` neither; moec has no `relative` and no `mrope`", _FLAGS, "for `rope`", (("for `learned_absolute`, the default", "embedding = tokens(positions = learned)"), ("for `yarn`", "attention = gqa(heads = 32, kv_heads = 8, rope = rope(scaling = yarn(4, original = 4096)))")), but={"learned_absolute": "write `embedding = tokens(positions = learned)` in `model`", "none": "leave it out: without `rope` and `positions = learned` there are no positions"}),
    Row("--use-rotary-position-embeddings", f"{GQA}.rope", "attention = gqa(heads = 32, kv_heads = 8, rope = rope())", "", "", _ARGUMENTS),
    Row("--disable-bias-linear", "", "", "", _BIASES, "core/transformer/moe/router.py, Router; training/arguments.py, validate_args"),
    Row("add_bias_linear", "", "", "", "a bias is said where it is: `swiglu(14_336, bias = true)`, `gqa(…, bias = all)`, `gate = topk(2, order = after, bias = learned)`; Megatron has all three by default", "core/transformer/moe/router.py, Router; training/arguments.py, validate_args"),
    Row("--init-method-std", "", "", "", "new weights have a standard deviation of 0.02, outputs into the residual stream 0.02 / sqrt(2 * depth), as with Megatron's default; other values are loaded, or set in the training script", "core/transformer/transformer_config.py, TransformerConfig.init_method_std"),
    Row("--embedding-init-method-std --init-method-xavier-uniform", "", "", "", "no equal: new weights are normal with 0.02, and 0.02 / sqrt(2 * depth) into the residual stream; others are set in the training script", "core/transformer/transformer_config.py, TransformerConfig.embedding_init_method_std"),
    Row("--mup-base-hidden-size --use-mup", "", "", "", "no equal: moec has no µP; initial values and learning rates are set in the training script", "core/transformer/transformer_config.py, TransformerConfig.use_mup"),
    Row("--hidden-dropout --attention-dropout", "", "", "", _NO_DROPOUT, "core/transformer/transformer_config.py, TransformerConfig.hidden_dropout"),
    Row("--mtp-num-layers", "", "", "", "no equal: moec has no multi-token prediction", "core/transformer/transformer_config.py, TransformerConfig.mtp_num_layers"),
    Row("--calculate-per-token-loss", "", "", "", "leave it out: moec always divides by all labels of a step. Without it Megatron takes the mean of micro-batches' and ranks' means: the same where all have as many labels", "core/pipeline_parallel/schedules.py, forward_step_calc_loss"),
)

_OF_ATTENTION = (
    Row("--num-attention-heads", f"{ATTENTION}.mha.heads", "attention = mha(heads = {}, rope = rope())", "32", "with `--group-query-attention` both numbers go into one `gqa`", _FLAGS, "with `--position-embedding-type rope`", (("with `learned_absolute`, the default, beside `embedding = tokens(positions = learned)`", "attention = mha(heads = {})"),)),
    Row("--num-query-groups", f"{GQA}.kv_heads", "attention = gqa(heads = 32, kv_heads = {}, rope = rope())", "8", "`heads` is your number of attention heads; without `--group-query-attention` it has no effect, and with it alone it is 1", _CONFIG),
    Row("--group-query-attention", ATTENTION, "attention = gqa(heads = 32, kv_heads = 8, rope = rope())", "", "", _CONFIG, but=off()),
    Row("--kv-channels", f"{GQA}.head_dim", "attention = gqa(heads = 32, kv_heads = 8, head_dim = {}, rope = rope())", "128", "", "core/transformer/transformer_config.py, TransformerConfig.kv_channels", but=off()),
    Row("--rotary-base", f"{ROPE}.theta", "rope = rope(theta = {})", "1e6", "", _ROPE, cases=(("with `--multi-latent-attention`", "rope = rope(theta = {}, interleaved = true)"),)),
    Row("--rotary-percent", f"{ROPE}.fraction", "rope = rope(fraction = {})", "0.5", "", _ROPE),
    Row("--rotary-interleaved", f"{ROPE}.interleaved", "rope = rope(interleaved = {})", "true", "", "core/models/common/embeddings/rope_utils.py, _rotate_half"),
    Row("--use-rope-scaling", f"{ROPE}.scaling", "rope = rope(theta = 500_000, scaling = llama3(8, original = 8192))", "", "the factor is `--rope-scaling-factor`, the rest is fixed there; theta is `--rotary-base`", "core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding._apply_scaling", but=off()),
    Row("--rope-scaling-factor", f"{ROPE}.scaling.llama3.factor", "rope = rope(scaling = llama3({}, original = 8192))", "8.0", "of no effect without `--use-rope-scaling`", "core/models/common/embeddings/rotary_pos_embedding.py, RotaryEmbedding._apply_scaling"),
    Row("--rotary-seq-len-interpolation-factor", f"{ROPE}.scaling.linear.factor", "rope = rope(scaling = linear({}))", "4", "", _ROPE),
    Row("--rotary-scaling-factor", f"{ROPE}.scaling.yarn.factor", "rope = rope(interleaved = true, scaling = yarn({}, original = 4096))", "40", "1 on the command line unless given, which changes nothing, and 40 in `MLATransformerConfig`", _YARN, "with `--multi-latent-attention`", (("with `--position-embedding-type yarn`", "rope = rope(scaling = yarn({}, original = 4096))"),)),
    Row("--mscale-all-dim", f"{ROPE}.scaling.yarn.mscale_all", "rope = rope(interleaved = true, scaling = yarn(40, original = 4096, mscale = 1, mscale_all = {}))", "1.0", "", "core/transformer/multi_latent_attention.py, MultiLatentAttention; core/models/common/embeddings/yarn_rotary_pos_embedding.py, _yarn_get_concentration_factor"),
    Row("--no-rope-freq", f"{GQA}.rope", "layers 3..31 step 4 { attention = gqa(heads = 32, kv_heads = 8) }", "", "that is every fourth layer without `rope`, for 4; after the block for all layers", "core/transformer/transformer_config.py, TransformerConfig.no_rope_freq"),
    Row("--window-size", f"{GQA}.window", "attention = gqa(heads = 32, kv_heads = 8, window = 4096, rope = rope())", "", "for `4095,0`: the left number there does not count the token itself, `window` does", "core/transformer/utils.py, get_sliding_window_causal_mask", renames=False, but=off()),
    Row("--window-attn-skip-freq", f"{GQA}.window", "layers 3..31 step 4 { attention = gqa(heads = 32, kv_heads = 8, rope = rope()) }", "", "that is every fourth layer without `window`, for 4; after the block for all layers", "core/transformer/utils.py, is_layer_window_attention", renames=False),
    Row("--qk-layernorm", f"{GQA}.qk_norm", "attention = gqa(heads = 32, kv_heads = 8, qk_norm = head, rope = rope())", "", "with `LayerNorm`, the default, it is one with a mean and a bias, which has no equal", "core/transformer/attention.py, SelfAttention", "with `--normalization RMSNorm`", renames=False, but=off()),
    Row("--qk-l2-norm", "", "", "", "no equal: `qk_norm` has a weight, and comes before `rope` unless `qk_norm_place = after_rope`", "core/transformer/attention.py, SelfAttention"),
    Row("--add-qkv-bias", f"{GQA}.bias", "attention = gqa(heads = 32, kv_heads = 8, bias = qkv, rope = rope())", "", "`all` without `--disable-bias-linear`", _ARGUMENTS, renames=False, but=off()),
    Row("softmax_scale", f"{GQA}.multiplier", "attention = gqa(heads = 32, kv_heads = 8, multiplier = {}, rope = rope())", "0.125", "", "core/transformer/transformer_config.py, TransformerConfig.softmax_scale", but=off()),
    Row("--multi-latent-attention", f"{ATTENTION}.mla", MLA_FORM, "", f"always rotary, in pairs of neighbours; {_MLA_YARN}", _MLA, but=off()),
    Row("--q-lora-rank", f"{MLA}.q_rank", MLA_FORM.replace("kv_rank", "q_rank = {}, kv_rank"), "1536", "", _MLA, but=off()),
    Row("--kv-lora-rank", f"{MLA}.kv_rank", MLA_FORM.replace("512", "{}"), "512", "32 is their default on the command line, 512 in `MLATransformerConfig`", _MLA),
    Row("--qk-head-dim", f"{MLA}.nope_dim", MLA_FORM.replace("nope_dim = 128", "nope_dim = {}"), "128", "", _MLA),
    Row("--qk-pos-emb-head-dim", f"{MLA}.rope_dim", MLA_FORM.replace("64", "{}"), "64", "", _MLA),
    Row("--v-head-dim", f"{MLA}.value_dim", MLA_FORM.replace("value_dim = 128", "value_dim = {}"), "128", "", _MLA),
)

_OF_EXPERTS = (
    Row("--ffn-hidden-size", "model.layers.ffn.swiglu.hidden", "ffn = swiglu({})", "14_336", "left out it is 4 * dim, with `--swiglu` int(dim * 8 / 3 / 64) * 64", _ARGUMENTS, "with `--swiglu` and `--disable-bias-linear`", (("with plain gelu, the default, and `--disable-bias-linear`", "ffn = gelu({})"),)),
    Row("--moe-ffn-hidden-size", f"{MOE}.experts.swiglu.hidden", "experts = 8 * swiglu({})", "14_336", "left out it is `--ffn-hidden-size`", "core/transformer/transformer_config.py, TransformerConfig.moe_ffn_hidden_size", "with `--swiglu` and `--disable-bias-linear`"),
    Row("--swiglu", "model.layers.ffn", "ffn = swiglu(14_336)", "", "of experts `experts = 8 * swiglu(14_336)`; the first half of the columns is the gate, in both", _CONFIG, but={"false": "write `ffn = gelu(WIDTH)`: plain gelu is Megatron's default"}),
    Row("activation_func", "model.layers.ffn", "ffn = swiglu(14_336)", "", "`gelu`, `relu`, `relu2` and `silu` are the words for others", _ACTIVATION, "for `F.silu` with `gated_linear_unit`"),
    Row("--squared-relu", "model.layers.ffn", "ffn = relu2(14_336)", "", "of experts `experts = 8 * relu2(14_336)`", "core/activations.py, squared_relu"),
    Row("--no-bias-gelu-fusion", "model.layers.ffn", "ffn = gelu(14_336, bias = true)", "", "the exact gelu, as with `--disable-bias-linear`; fused with biases, the default, it is the form by tanh, which moec does not have", _ACTIVATION),
    Row("--openai-gelu", "", "", "", "no equal: `gelu` here is the exact one, of the error function; Megatron Core does not read this flag", "core/transformer/utils.py, openai_gelu"),
    Row("--quick-geglu", "model.layers.ffn", "ffn = swiglu(14_336, alpha = 1.702)", "", "with `--glu-linear-offset 1` it is the same", "core/activations.py, quick_gelu; core/transformer/mlp.py, MLP.forward", differs="1 is added to the other factor here, and nothing there"),
    Row("--glu-linear-offset", "model.layers.ffn", "ffn = swiglu(14_336, alpha = 1.702)", "", "for 1 with `--quick-geglu`; other offsets have no equal", _ACTIVATION, but=off()),
    Row("--activation-func-clamp-value", f"{MOE}.experts.swiglu.clamp", "experts = 8 * swiglu(14_336, clamp = {})", "7.0", "", _ACTIVATION, "with `--swiglu`", (("with `--quick-geglu` and `--glu-linear-offset 1`", "experts = 8 * swiglu(14_336, clamp = {}, alpha = 1.702)"),), but=off()),
    Row("--moe-layer-freq", MOE, "layers 0..30 step 2 { moe { … } }", "", "that is every second layer, from layer 0, for 2; a later `layers` block replaces what it names", "core/models/gpt/gpt_layer_specs.py, get_gpt_decoder_layer_specs", but={"1": "leave it out: `moe` in `layers { … }` is in every layer"}),
    Row("--moe-shared-expert-intermediate-size", f"{MOE}.shared.swiglu.hidden", "shared = swiglu({})", "2816", "the total width of all shared experts; they have no biases", "core/transformer/moe/shared_experts.py, SharedExpertMLP", "with `--swiglu`", (("with plain gelu, the default", "shared = gelu({})"),), but=off()),
    Row("--moe-shared-expert-gate", f"{MOE}.shared.swiglu.gated", "shared = swiglu(2816, gated = true)", "", "", "core/transformer/moe/shared_experts.py, SharedExpertMLP.forward", but=off()),
    Row("--moe-latent-size", "", "", "", "no equal: moec has no projection around the experts", "core/transformer/transformer_config.py, TransformerConfig.moe_latent_size"),
    Row("--moe-apply-probs-on-input", "", "", "", "no equal: weights multiply what experts return, not what they get", "core/transformer/transformer_config.py, TransformerConfig.moe_apply_probs_on_input"),
)

_OF_GATES = (
    Row("--moe-router-topk", f"{GATE}.k", "gate = topk({}, order = after)", "2", "without that flag the router has a bias, `bias = learned`; k = 1 wants `--moe-router-pre-softmax` there", _TOPK, "by default with `--disable-bias-linear`, the softmax of the chosen logits", ((_PRE, "gate = topk({})"), (_SIGMOID, "gate = topk({}, score = sigmoid, normalize = true)")), renames=False, but={"1": "write `gate = topk(1)`: Megatron refuses k = 1 without `--moe-router-pre-softmax`"}),
    Row("--moe-router-pre-softmax", f"{GATE}.order", "gate = topk(2, order = before)", "", "the default here; the weights are then not divided by their sum", _TOPK, renames=False, but={"false": "write `gate = topk(2, order = after)`: the softmax is over the chosen logits"}),
    Row("--moe-router-score-function", f"{GATE}.score", "gate = topk(8, score = sigmoid, normalize = true)", "", "for k = 1 without `normalize`; `sqrtsoftplus` has no equal", _TOPK, "for `sigmoid`", (("for `softmax`, their default", "gate = topk(8, order = after)"),), renames=False, but={"softmax": "write `gate = topk(K, order = after)`, or `gate = topk(K)` with `--moe-router-pre-softmax`", "sqrtsoftplus": "no equal: `score` is `softmax` or `sigmoid`"}),
    Row("--moe-router-topk-scaling-factor", f"{GATE}.scale", "gate = topk(8, order = after, scale = {})", "2.5", "", _TOPK, cases=((_SIGMOID, _OF_SIGMOID + ", scale = {})"), (_PRE, "gate = topk(8, scale = {})")), but=off()),
    Row("--moe-router-num-groups", f"{GATE}.groups", "gate = topk(8, order = after, groups = {}, keep_groups = 4)", "8", _RANKED, _GROUPS, "by sums of logits, where the softmax is of the chosen", ((_SIGMOID, _OF_SIGMOID + ", groups = {}, keep_groups = 4)"), (_PRE, "gate = topk(8, groups = {}, keep_groups = 4)")), renames=False, but=off()),
    Row("--moe-router-group-topk", f"{GATE}.keep_groups", "gate = topk(8, order = after, groups = 8, keep_groups = {})", "4", _RANKED, _GROUPS, "by sums of logits, where the softmax is of the chosen", ((_SIGMOID, _OF_SIGMOID + ", groups = 8, keep_groups = {})"), (_PRE, "gate = topk(8, groups = 8, keep_groups = {})")), renames=False, but=off()),
    Row("--moe-router-enable-expert-bias", f"{GATE}.bias", _OF_SIGMOID + ", bias = online(1e-3))", "", "Megatron wants sigmoid scores with it; for k = 1 without `normalize`", _BIAS, renames=False, but=off()),
    Row("--moe-router-bias-update-rate", f"{GATE}.bias.online.rate", _OF_SIGMOID + ", bias = online({}))", "1e-3", "of no effect without `--moe-router-enable-expert-bias`", _BIAS, renames=False, but=off()),
    Row("--moe-input-jitter-eps", f"{GATE}.jitter", "gate = topk(2, order = after, jitter = {})", "0.01", "Megatron draws in evaluation too, moec in training alone", "core/transformer/moe/router.py, TopKRouter.apply_input_jitter", cases=((_PRE, "gate = topk(2, jitter = {})"),), renames=False, but=off()),
    Row("--moe-router-dtype", "model.router_dtype", "router_dtype = {}", "fp32", "the default here; unset, Megatron's logits and weights are of the model's dtype: `router_dtype = model`", "core/transformer/moe/router.py, Router.gating; moe_utils.py, topk_routing_with_score_function", but={"fp64": "there is no equal; nearest is `router_dtype = fp32`, the default"}),
    Row("--moe-expert-capacity-factor", f"{CAPACITY}.factor", "capacity = factor({}, order = weight)", "1.25", f"{_SEVERAL}; {_SHARD}", _DROPS, "with `--moe-token-drop-policy probs`, their default", renames=False, but=off("leave it out: without a capacity no token is dropped")),
    Row("--moe-token-drop-policy", f"{CAPACITY}.order", "capacity = factor(1.25, order = weight)", "", _SEVERAL, _DROPS, "for `probs`, their default", renames=False, but={"probs": f"write `capacity = factor(1.25, order = weight)`: {_BY_WEIGHT}", "position": f"{_BY_TOPK}, `capacity = factor(1.25)`"}),
    Row("--moe-pad-expert-input-to-capacity", f"{MOE}.overflow", "overflow = pad", "", "beside `capacity = factor(…)`; with `--moe-router-enable-expert-bias` Megatron counts the padding, and its biases stay as they are", _DROPS, but=off()),
    Row("moe_token_dropping", "", "", "", "leave it out: Megatron does not support it; `--moe-expert-capacity-factor` is what drops", "core/transformer/transformer_config.py, TransformerConfig.moe_token_dropping"),
    Row("--moe-router-load-balancing-type", f"{MOE}.balance", "balance = [switch_loss(0.01)]", "", f"{_RANK}, for `global_aux_loss` `group = batch` where a step has one micro-batch; {_PLAIN}", _AUX, "for `aux_loss`, their default", (("for `seq_aux_loss`", "balance = [sequence_loss(0.01)]"),), but=off("leave it out: there is no term by default") | {"seq_aux_loss": "write `balance = [sequence_loss(WEIGHT)]`", "global_aux_loss": "write `balance = [switch_loss(WEIGHT)]` and `group = batch`: the same where a step has one micro-batch, and with expert biases or groups `switch_loss(WEIGHT, fractions = scores)`", **dict.fromkeys(("sinkhorn", "quantile_balancing"), _NEVER)}),
    Row("--moe-aux-loss-coeff", SWITCH_LOSS, "balance = [switch_loss({})]", "0.01", f"the same value, {_RANK}; {_PLAIN}", _AUX, cases=(("with `--moe-router-load-balancing-type seq_aux_loss`", "balance = [sequence_loss({})]"),), renames=False, but=off()),
    Row("--moe-z-loss-coeff", f"{MOE}.balance.z_loss.weight", "balance = [z_loss({})]", "1e-3", "the same value", "core/transformer/moe/moe_utils.py, z_loss_func", but=off()),
)

_TRAINING = (
    Row("--lr", f"{ADAMW}.lr", "optimizer = adamw(lr = {})", "3e-4", "the rate that a schedule of the training script multiplies", _OPTIMIZER),
    Row("--weight-decay", f"{ADAMW}.weight_decay", "optimizer = adamw(weight_decay = {})", "0.01", "0.01 is their default, 0.1 ours; neither decays biases and vectors", "core/optimizer/__init__.py, get_standard_config_overrides"),
    Row("--adam-beta1", f"{ADAMW}.beta1", "optimizer = adamw(beta1 = {})", "0.9", "", _OPTIMIZER),
    Row("--adam-beta2", f"{ADAMW}.beta2", "optimizer = adamw(beta2 = {})", "0.95", "0.999 is their default, 0.95 ours", _OPTIMIZER),
    Row("--adam-eps", f"{ADAMW}.eps", "optimizer = adamw(eps = {})", "1e-8", "", _OPTIMIZER),
    Row("--sequence-parallel", "parallel.sequence_parallel", "sequence_parallel = {}", "true", "the default here; without effect where `tp = 1`"),
    Row("--recompute-granularity", "parallel.recompute", "recompute = layer", "", f"for `selective` {_SELECTIVE}", _RECOMPUTE, "for `full`", but=off() | {"selective": _SELECTIVE}),
    Row("--recompute-activations", "", "", "", f"it is `--recompute-granularity selective`: {_SELECTIVE}", _ARGUMENTS),
    Row("--recompute-modules --moe-layer-recompute", "parallel.recompute", "recompute = experts", "", "`core_attn` needs nothing: attention saves no scores here; `recompute = layer` is for all others together", _RECOMPUTE, "for `moe` and `moe_act`", but=off() | {"core_attn": "leave it out: attention saves no scores here"}),
    Row("--recompute-method --recompute-num-layers", "", "", "", "each layer is computed again by itself, as with Megatron's `uniform` and one layer; `parallel { layers 8..31 { recompute = layer } }` chooses layers"),
)

ROWS: tuple[Row, ...] = (*_MODEL, *_OF_ATTENTION, *_OF_EXPERTS, *_OF_GATES, *_TRAINING)
