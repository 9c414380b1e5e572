"""Names that other systems use, beside the names of this language. `aliases.py` reads this table.

A row: the names with the systems that use them, the path of the word here, how it is written with `{}` for the value,
an example of the value, and a note. Without a path there is no such word, and the note says what there is instead.
Where a value such as `false` is written in another way than the form, `but` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501


class Row(NamedTuple):
    """`convert`: the written form means the same wherever the name may stand, so a tool may put it in its place.

    `but` is what to do for some values, in lower case, that the form is not written for.
    """

    names: str
    path: str
    form: str
    example: str
    note: str = ""
    convert: bool = False
    but: Mapping[str, str] = {}


def _off(help: str = "leave it out: that is the default here", **others: str) -> dict[str, str]:
    """What to do where a name is switched off."""
    return {**dict.fromkeys(("false", "0", "0.0", "none", "null"), help), **others}


SYSTEMS = {
    "hf": "Hugging Face",
    "mg": "Megatron",
    "ds": "DeepSpeed",
    "tu": "Tutel",
    "fm": "FastMoE",
    "tt": "torchtitan",
    "pt": "PyTorch",
    "pl": "Lightning",
    "ot": "other libraries",
}

_ATTENTION = "model.layers.attention"
_MLA = f"{_ATTENTION}.mla"
_GQA = f"{_ATTENTION}.gqa"
_ROPE = f"{_GQA}.rope.rope"
_MOE = "model.layers.moe"
_GATE = f"{_MOE}.gate.topk"
_MLA_FORM = "attention = mla(heads = 128, kv_rank = 512, nope_dim = 128, rope_dim = 64, value_dim = 128)"

_MODEL = (
    Row("hidden_size:hf,mg,ds n_embd:hf d_model:hf,fm model_dim:tu hidden_dim:hf dim_model:hf dmodel:ot", "model.dim", "dim = {}", "4096"),
    Row("num_hidden_layers:hf num_layers:hf,mg,ds n_layer:hf n_layers:hf,tt nlayers:ot", "model.depth", "depth = {}", "32"),
    Row("vocab_size:hf,tt,mg padded_vocab_size:mg n_vocab:hf vocabulary_size:ot", "model.vocab", "vocab = {}", "32_000"),
    Row("max_position_embeddings:hf,mg n_positions:hf n_ctx:hf max_seq_len:tt context_length:hf block_size:hf", "model.context", "context = {}", "4096"),
    Row("torch_dtype:hf params_dtype:mg training_dtype:tt param_dtype:ot compute_dtype:ot", "model.dtype", "dtype = {}", "bf16"),
    Row("precision:pl", "model.dtype", "dtype = bf16", "", "that is Lightning's `bf16-mixed`; `fp32` is its `32-true`, and moec does not train in fp16 yet"),
    Row("amp:ds autocast:pt mixed_precision:hf", "model.dtype", "dtype = {}", "bf16", "parameters and optimizer stay fp32 beside it: `master = fp32` in `train`", but=_off("write `dtype = fp32` in `model`: bf16 is the default", no="write `dtype = fp32` in `model`: bf16 is the default", fp16="moec does not train in fp16 yet: write `dtype = bf16` in `model`", **dict.fromkeys(("true", "yes", "on"), "write `dtype = bf16` in `model`, or leave it out: that is the default"))),
    Row("rms_norm_eps:hf rms_eps:ot", "model.norm.rms.eps", "norm = rms(eps = {})", "1e-5", convert=True),
    Row("layernorm_epsilon:mg norm_epsilon:mg norm_eps:tt", "model.norm.rms.eps", "norm = rms(eps = {})", "1e-5", "`layer_norm(eps = …)` where the norm has a mean and a bias"),
    Row("layer_norm_eps:hf layer_norm_epsilon:hf", "model.norm.layer_norm.eps", "norm = layer_norm(eps = {})", "1e-5", convert=True),
    Row("normalization:mg norm_type:hf", "model.norm", "norm = {}", "rms(eps = 1e-5)"),
    Row("tie_word_embeddings:hf share_embeddings_and_output_weights:mg tie_embeddings:hf", "model.embedding.tokens.tied", "embedding = tokens(tied = {})", "true", convert=True),
    Row("untie_embeddings_and_output_weights:mg", "model.embedding.tokens.tied", "embedding = tokens(tied = false)", "", "untied is the default", but={"true": "leave it out: untied is the default here", "false": "write `embedding = tokens(tied = true)` in `model`"}),
    Row("position_embedding_type:hf,mg", f"{_GQA}.rope", "attention = mha(heads = 32, rope = rope())", "", "`embedding = tokens(positions = learned)` for learned positions; without either there are none"),
    Row("pad_token_id:hf", "model.embedding.tokens.padding", "embedding = tokens(padding = {})", "0", "only where padding tokens must go to no expert", but=_off()),
    Row("eos_token_id:hf bos_token_id:hf", "model.embedding.tokens.separator", "embedding = tokens(separator = {})", "2", "only where several texts are packed in a sequence; else leave it out", but=_off()),
    Row("embedding_multiplier:hf", "model.embedding.tokens.multiplier", "embedding = tokens(multiplier = {})", "12.0", convert=True),
    Row("image_size:hf", "model.embedding.patches.image", "embedding = patches(image = {}, size = 16)", "224"),
    Row("patch_size:hf", "model.embedding.patches.size", "embedding = patches(image = 224, size = {})", "16"),
    Row("num_labels:hf", "model.head.classes.count", "head = classes({})", "1000", convert=True),
)

_OF_ATTENTION = (
    Row("num_attention_heads:hf,mg,ds n_head:hf n_heads:hf,tt num_heads:hf nheads:ot", f"{_ATTENTION}.mha.heads", "attention = mha(heads = {}, rope = rope())", "32", "with fewer key and value heads, both numbers go into one `gqa`; without `rope` there are no positions"),
    Row("num_key_value_heads:hf num_query_groups:mg n_kv_heads:tt num_kv_heads:hf", f"{_GQA}.kv_heads", "attention = gqa(heads = 32, kv_heads = {}, rope = rope())", "8", "`heads` is your number of attention heads"),
    Row("group_query_attention:mg", _ATTENTION, "attention = gqa(heads = 32, kv_heads = 8)", "", but=_off()),
    Row("kv_channels:mg attention_head_dim:hf d_head:ot head_size:ot", f"{_GQA}.head_dim", "attention = gqa(heads = 32, kv_heads = 8, head_dim = {})", "128", but=_off()),
    Row("rope_theta:hf,tt rotary_base:mg rotary_emb_base:hf rope_base:hf", f"{_ROPE}.theta", "rope = rope(theta = {})", "1e6", convert=True),
    Row("rotary_percent:mg partial_rotary_factor:hf rotary_pct:hf", f"{_ROPE}.fraction", "rope = rope(fraction = {})", "0.5", convert=True),
    Row("rope_scaling:hf rope_parameters:hf rope_type:hf", f"{_ROPE}.scaling", "rope = rope(scaling = yarn(4, original = 4096))", "", "scalings are `linear`, `ntk`, `yarn`, `llama3` and `longrope`", but=_off()),
    Row("rotary_interleaved:mg rope_interleave:hf", f"{_ROPE}.interleaved", "rope = rope(interleaved = {})", "true", convert=True),
    Row("sliding_window:hf window_size:mg", f"{_GQA}.window", "attention = gqa(heads = 32, kv_heads = 8, window = {})", "4096", but=_off()),
    Row("qk_layernorm:mg use_qk_norm:hf", f"{_GQA}.qk_norm", "attention = gqa(heads = 32, kv_heads = 8, qk_norm = head)", "", but=_off()),
    Row("attention_bias:hf", f"{_GQA}.bias", "attention = gqa(heads = 32, kv_heads = 8, bias = all)", "", "`qkv` where the output projection has none", but=_off()),
    Row("add_qkv_bias:mg qkv_bias:hf", f"{_GQA}.bias", "attention = gqa(heads = 32, kv_heads = 8, bias = qkv)", "", "`all` for the output projection too", but=_off()),
    Row("softmax_scale:mg attention_multiplier:hf", f"{_GQA}.multiplier", "attention = gqa(heads = 32, kv_heads = 8, multiplier = {})", "0.125", but=_off()),
    Row("clip_qkv:hf", f"{_GQA}.clip", "attention = gqa(heads = 32, kv_heads = 8, clip = {})", "8.0", but=_off()),
    Row("q_lora_rank:hf,mg,tt", f"{_MLA}.q_rank", _MLA_FORM.replace("kv_rank", "q_rank = {}, kv_rank"), "1536", but=_off()),
    Row("kv_lora_rank:hf,mg,tt", f"{_MLA}.kv_rank", _MLA_FORM.replace("512", "{}"), "512"),
    Row("qk_nope_head_dim:hf,tt qk_head_dim:mg", f"{_MLA}.nope_dim", _MLA_FORM.replace("nope_dim = 128", "nope_dim = {}"), "128"),
    Row("qk_rope_head_dim:hf,tt qk_pos_emb_head_dim:mg", f"{_MLA}.rope_dim", _MLA_FORM.replace("64", "{}"), "64"),
    Row("multi_latent_attention:mg", f"{_ATTENTION}.mla", _MLA_FORM, "", but=_off()),
    Row("v_head_dim:hf,mg,tt", f"{_MLA}.value_dim", _MLA_FORM.replace("value_dim = 128", "value_dim = {}"), "128"),
)

_OF_MIXTURES = (
    Row("intermediate_size:hf ffn_hidden_size:mg n_inner:hf ffn_dim:hf mlp_dim:ot ffn_size:ot d_ff:hf inter_dim:tt", "model.layers.ffn.swiglu.hidden", "ffn = swiglu({})", "14_336", "`gelu`, `relu`, … for another activation; of an expert it is in `experts = 8 * swiglu(14_336)`"),
    Row("mlp:hf,mg feed_forward:tt", "model.layers.ffn", "ffn = swiglu(14_336)", "", "of experts it is `experts = 8 * swiglu(14_336)` in `moe`"),
    Row("moe_intermediate_size:hf moe_ffn_hidden_size:mg moe_inter_dim:tt d_hidden:fm expert_ffn_hidden_size:hf hidden_size_per_expert:tu moe_hidden_dim:tt", f"{_MOE}.experts.swiglu.hidden", "experts = 8 * swiglu({})", "14_336", "`gelu`, `relu`, … for another activation"),
    Row("hidden_act:hf activation_function:hf activation_func:mg hidden_activation:hf ffn_activation:hf activation:ot act:ot act_fn:ot", "model.layers.ffn", "ffn = swiglu(14_336)", "", "the activation is the word of the call: `swiglu` for a gated `silu`, `geglu`, `gelu`, `relu`, `relu2`, `silu`"),
    Row("num_experts:hf,mg,ds,tt num_local_experts:hf n_routed_experts:hf,tt num_moe_experts:mg moe_num_experts:hf n_experts:hf num_global_experts:tu expert_num:fm", f"{_MOE}.experts.count", "experts = {} * swiglu(14_336)", "8", "the width of one expert stands after the number"),
    Row("num_expert:fm num_experts_per_device:tu count_per_node:tu num_local_expert:fm", f"{_MOE}.experts.count", "experts = 8 * swiglu(14_336)", "", "the number is that of all experts of a layer, not of one device's; `ep` says over how many ranks they lie"),
    Row("num_experts_per_tok:hf top_k:ds,fm,tt moe_router_topk:mg router_topk:ot num_active_experts:ot active_experts:ot moe_top_k:fm moe_topk:mg num_experts_per_token:hf experts_per_token:hf num_selects:hf moe_k:hf", f"{_GATE}.k", "gate = topk({})", "2", "`gate = topk({}, normalize = true)` where the weights of a token's choices add to 1, as in Mixtral and in DeepSpeed's and Megatron's top 2"),
    Row("norm_topk_prob:hf normalize_gate:tu route_norm:tt moe_router_norm_topk_prob:mg", f"{_GATE}.normalize", "gate = topk(2, normalize = {})", "true"),
    Row("scoring_func:hf score_func:tt moe_router_score_function:mg score_function:ot", f"{_GATE}.score", "gate = topk(2, score = {})", "sigmoid"),
    Row("routed_scaling_factor:hf route_scale:tt moe_router_topk_scaling_factor:mg", f"{_GATE}.scale", "gate = topk(2, scale = {})", "2.5"),
    Row("moe_router_pre_softmax:mg pre_softmax:mg", f"{_GATE}.order", "gate = topk(2, order = before)", "", "that is the default", but={"false": "write `gate = topk(2, order = after)`: the softmax is over the chosen logits"}),
    Row("n_group:hf moe_router_num_groups:mg n_expert_groups:tt num_expert_groups:tt", f"{_GATE}.groups", "gate = topk(8, groups = {}, keep_groups = 4)", "8", but=_off()),
    Row("topk_group:hf moe_router_group_topk:mg n_limited_groups:tt num_limited_groups:tt", f"{_GATE}.keep_groups", "gate = topk(8, groups = 8, keep_groups = {})", "4", but=_off()),
    Row("moe_router_enable_expert_bias:mg use_expert_bias:hf", f"{_GATE}.bias", "gate = topk(8, score = sigmoid, bias = online(1e-3))", "", but=_off()),
    Row("moe_router_bias_update_rate:mg load_balance_coeff:tt bias_update_speed:hf", f"{_GATE}.bias.online.rate", "gate = topk(8, score = sigmoid, bias = online({}))", "1e-3", but=_off()),
    Row("router_jitter_noise:hf moe_input_jitter_eps:mg jitter_noise:hf input_jitter_noise:hf", f"{_GATE}.jitter", "gate = topk(2, jitter = {})", "0.01", but=_off()),
    Row("gate_noise:tu", f"{_GATE}.noise", "gate = topk(2, noise = 0.125)", "", "Tutel's number divided by the number of experts", but=_off()),
    Row("router_noise:hf", f"{_GATE}.noise", "gate = topk(2, noise = {})", "1.0", but=_off()),
    Row("noisy_gate_policy:ds", f"{_MOE}.gate.switch.jitter", "gate = switch(jitter = 0.01)", "", "this is `Jitter`; for random noise on the logits `topk(1, noise = 1.0)`, which is Gaussian", but=_off()),
    Row("batch_prioritized_routing:tu", f"{_MOE}.gate", "gate = batch_priority(2)", "", but=_off()),
    Row("router:hf,tt", f"{_MOE}.gate", "gate = topk(2)", "", "other gates are `switch`, `expert_choice`, `soft`, …: `moec explain gate`"),
    Row("gate_type:tu moe_router_type:mg router_type:hf", f"{_MOE}.gate", "gate = topk(2)", ""),
    Row("capacity_factor:ds,tu,fm", f"{_MOE}.capacity.factor.factor", "capacity = factor({})", "1.25", "DeepSpeed and Megatron count a rank's tokens: then `group = rank` is a further line of `moe`; DeepSpeed's default also has a least number, `factor({}, min = 4)`; Tutel counts otherwise: docs/from/tutel.md", but=_off("leave it out: without a capacity no token is dropped")),
    Row("moe_expert_capacity_factor:mg expert_capacity_factor:hf moe_train_capacity_factor:ds", f"{_MOE}.capacity.factor.factor", "capacity = factor({})", "1.25", convert=True, but=_off("leave it out: without a capacity no token is dropped")),
    Row("eval_capacity_factor:ds moe_eval_capacity_factor:ds", f"{_MOE}.capacity.factor.eval", "capacity = factor(1.25, eval = {})", "2.0"),
    Row("min_capacity:ds moe_min_capacity:ds", f"{_MOE}.capacity.factor.min", "capacity = factor(1.25, min = {})", "4"),
    Row("expert_capacity:hf", f"{_MOE}.capacity", "capacity = factor(1.25)", "", "a multiple of an equal share, not a number of tokens"),
    Row("drop_tokens:ds moe_token_dropping:mg token_dropping:hf", f"{_MOE}.capacity", "capacity = factor(1.25)", "", "full experts then drop tokens", but=_off("write `capacity = dropless()`, the default: no token is dropped")),
    Row("use_rts:ds", f"{_MOE}.capacity.factor.order", "capacity = factor(1.25, order = random)", "", but=_off("leave it out: the order is that of the sequence by default")),
    Row("moe_token_drop_policy:mg", f"{_MOE}.capacity.factor.order", "capacity = factor(1.25, order = priority)", "", "`priority` for Megatron's `probs`, `sequence` for `position`"),
    Row("moe_pad_expert_input_to_capacity:mg", f"{_MOE}.overflow", "overflow = pad", "", "beside `capacity = factor(…)`", but=_off()),
    Row("moe_aux_loss_coeff:mg", f"{_MOE}.balance.switch_loss.weight", "balance = [switch_loss({})]", "0.01", "the same value, with `group = rank`", but=_off()),
    Row("aux_loss_coef:hf router_aux_loss_coef:hf load_balancing_loss_coef:hf load_balancing_loss:hf load_balance_loss:hf", f"{_MOE}.balance.switch_loss.weight", "balance = [switch_loss(WEIGHT)]", "COEFFICIENT", "WEIGHT is {} * k / L, for k experts per token and L layers with experts: docs/from/huggingface.md", but=_off()),
    Row("aux_loss_alpha:hf", f"{_MOE}.balance.switch_loss.weight", "balance = [switch_loss({})]", "0.01", "the term is 1 for equal loads and any k", but=_off()),
    Row("aux_loss:tu aux_loss_weight:tu", f"{_MOE}.balance.switch_loss.weight", "balance = [switch_loss({})]", "0.01", "where a token has several experts, Tutel's and DeepSpeed's count the first alone: `gshard_loss({})`; Hugging Face's weight is multiplied by k and divided by the number of layers with experts (docs/from)", but=_off()),
    Row("moe_loss_coeff:ds", f"{_MOE}.balance.switch_loss.weight", "balance = [switch_loss({})]", "0.01", "where a token has two experts, DeepSpeed's counts the first alone: `gshard_loss({})`", but=_off()),
    Row("router_z_loss_coef:hf moe_z_loss_coeff:mg z_loss_coef:hf router_z_loss_weight:hf", f"{_MOE}.balance.z_loss.weight", "balance = [z_loss({})]", "1e-3", but=_off()),
    Row("seq_aux_loss_coef:hf seq_aux:hf", f"{_MOE}.balance.sequence_loss.weight", "balance = [sequence_loss(1e-4)]", "", but=_off()),
    Row("is_gshard_loss:tu", f"{_MOE}.balance", "balance = [gshard_loss(0.01)]", "", but={"false": "write `balance = [importance_loss(0.005), load_loss(0.005)]`, with half of the weight for each"}),
    Row("moe_router_load_balancing_type:mg balance_strategy:fm", f"{_MOE}.balance", "balance = [switch_loss(0.01)]", "", "terms are `switch_loss`, `gshard_loss`, `sequence_loss`, `device_loss`, `z_loss`, …; or a gate's `bias = online(1e-3)`", but=_off()),
    Row("use_residual:ds", f"{_MOE}.residual", "residual = gelu(4096)", "", "the dense path is written out", but=_off()),
    Row("n_shared_experts:hf shared_experts:hf num_shared_experts:tt,hf moe_num_shared_experts:hf shared_expert:ot", f"{_MOE}.shared", "shared = swiglu(2816)", "", "WIDTH is the number of shared experts times the width of one", but=_off()),
    Row("moe_shared_expert_intermediate_size:mg", f"{_MOE}.shared.swiglu.hidden", "shared = swiglu({})", "2816", convert=True, but=_off()),
    Row("shared_expert_intermediate_size:hf", f"{_MOE}.shared.swiglu.hidden", "shared = swiglu({}, gated = true)", "2816", "Qwen's shared expert has a gate; without one `shared = swiglu(2816)`", but=_off()),
    Row("moe_shared_expert_gate:mg use_shared_expert_gate:hf", f"{_MOE}.shared.swiglu.gated", "shared = swiglu(2816, gated = true)", "", but=_off()),
    Row("moe_layer_freq:mg,hf", _MOE, "layers 0..30 step 2 { moe { … } }", "", "that is every second layer, from layer 0; a later `layers` block replaces what it names", but={"1": "leave it out: `moe` in `layers { … }` is in every layer"}),
    Row("decoder_sparse_step:hf expert_interval:ds encoder_sparse_step:hf", _MOE, "layers 1..31 step 2 { moe { … } }", "", "that is every second layer, from layer 1; a later `layers` block replaces what it names", but={"1": "leave it out: `moe` in `layers { … }` is in every layer"}),
    Row("first_k_dense_replace:hf n_dense_layers:tt num_dense_layers:hf dense_layers:ot", "model.layers.ffn", "layers 0..2 { ffn = swiglu(18_432) }", "", "that is the first three layers; a later `layers` block replaces what it names", but=_off() | {"1": "write `layers 0 { ffn = swiglu(WIDTH) }` in `model`, after the `layers` block for all layers"} | {str(k): f"write `layers 0..{k - 1} {{ ffn = swiglu(WIDTH) }}` in `model`, after the `layers` block for all layers" for k in range(2, 9)}),
    Row("mlp_only_layers:hf", "model.layers.ffn", "layers [0, 5] { ffn = swiglu(18_432) }", "", "a later `layers` block replaces what it names", but=_off()),
)

ADAMW_DIFFERS = frozenset(("beta2", "weight_decay"))
"""Arguments of `adamw` whose defaults are others elsewhere."""
ADAMW_DEFAULTS = "its defaults are beta2 = 0.95 and weight_decay = 0.1, PyTorch's are 0.999 and 0.01, DeepSpeed's 0.999 and 0"

_TRAINING = (
    Row("seq_len:hf,tt seq_length:mg,ds sequence_length:hf max_length:hf max_seq_length:hf seqlen:ot max_len:ot", "train.sequence", "sequence = {}", "4096"),
    Row("global_batch_size:mg,tt global_batch:ot train_batch_size:ds", "train.batch", "batch = {}", "1024"),
    Row("micro_batch_size:mg train_micro_batch_size_per_gpu:ds per_device_train_batch_size:hf local_batch_size:tt micro_batch:ot", "parallel.microbatches", "microbatches = 4", "", "how many micro-batches there are: a data-parallel rank's part of `batch`, divided by the size of a micro-batch"),
    Row("gradient_accumulation_steps:hf,ds num_microbatches:mg num_micro_batches:mg grad_accum:ot accumulation_steps:ot accumulate_grad_batches:pl gradient_accumulation:hf", "parallel.microbatches", "microbatches = {}", "4"),
    Row("learning_rate:hf", "train.optimizer.adamw.lr", "optimizer = adamw(lr = {})", "3e-4", ADAMW_DEFAULTS),
    Row("betas:hf,ds", "train.optimizer.adamw.beta1", "optimizer = adamw(beta1 = 0.9, beta2 = 0.95)", "", "each has a name of its own"),
    Row("adam_beta1:hf,mg", "train.optimizer.adamw.beta1", "optimizer = adamw(beta1 = {})", "0.9"),
    Row("adam_beta2:hf,mg", "train.optimizer.adamw.beta2", "optimizer = adamw(beta2 = {})", "0.95"),
    Row("adam_eps:mg adam_epsilon:hf epsilon:hf", "train.optimizer.adamw.eps", "optimizer = adamw(eps = {})", "1e-8"),
    Row("wd:ot", "train.optimizer.adamw.weight_decay", "optimizer = adamw(weight_decay = {})", "0.1"),
    Row("use_distributed_optimizer:mg", "parallel.zero", "zero = 1", "", "masters and optimizer states are cut over the data-parallel ranks", but=_off()),
    Row("master_weights:ds main_params_dtype:mg", "train.master", "master = fp32", "", "that is the default"),
)

_PARALLEL = (
    Row("tensor_model_parallel_size:mg tensor_parallel_degree:tt tensor_parallel_size:hf,ds tensor_parallel:ot tp_size:hf,ds", "parallel.tp", "tp = {}", "2", but={"true": "write its degree, `tp = 2`"}),
    Row("expert_model_parallel_size:mg expert_parallel_degree:tt expert_parallel_size:hf,ds expert_parallel:ot ep_size:ds moe_expert_parallel_size:ds", "parallel.ep", "ep = {}", "8", but={"true": "write its degree, `ep = 8`"}),
    Row("pipeline_model_parallel_size:mg pipeline_parallel_degree:tt pipeline_parallel_size:hf pipeline_parallel:ot pp_size:ds", "parallel.pp", "pp = {}", "2", but={"true": "write its degree, `pp = 2`"}),
    Row("sp:ot", "parallel.sequence_parallel", "sequence_parallel = {}", "true", "the default where `tp` is above 1"),
    Row("context_parallel_size:mg context_parallel:ot context_parallel_degree:tt cp_size:mg", "parallel.cp", "cp = {}", "2", but={"true": "write its degree, `cp = 2`"}),
    Row("expert_tensor_parallel_size:mg expert_tensor_parallel_degree:tt", "parallel.etp", "etp = {}", "2"),
    Row("enable_expert_tensor_parallelism:ds", "parallel.etp", "etp = 2", "", but=_off()),
    Row("data_parallel_size:mg,ds dp_size:ds data_parallel:mg", "parallel.dp", "dp = {}", "8", "left out it is what the ranks leave"),
    Row("data_parallel_shard_degree:tt data_parallel_replicate_degree:tt", "parallel.dp", "dp = 8", "", "it is the product of both; `zero = 3` cuts the weights over all of it"),
    Row("zero_stage:ds stage:ds zero_optimization:ds", "parallel.zero", "zero = {}", "2"),
    Row("fsdp:tt fully_shard:tt", "parallel.zero", "zero = 3", "", "it cuts weights, gradients and optimizer states over the data-parallel ranks", but=_off()),
    Row("recompute_granularity:mg", "parallel.recompute", "recompute = layer", "", "`layer` for Megatron's `full`; `experts` computes only the experts again", but=_off()),
    Row("recompute_modules:mg", "parallel.recompute", "recompute = experts", "", "for Megatron's `moe`; `recompute = layer` also computes the attention again", but=_off()),
    Row("gradient_checkpointing:hf activation_checkpointing:ds,tt activation_checkpoint:tt recompute_activations:mg remat:ot", "parallel.recompute", "recompute = layer", "", "or `experts`, or `none`, which is the default", but=_off()),
    Row("offload_optimizer:ds cpu_offload:ds optimizer_cpu_offload:mg", "parallel.offload", "offload = optimizer", "", but=_off()),
    Row("offload_param:ds", "parallel.offload", "offload = parameters", "", but=_off()),
    Row("pipeline_schedule:tt pipeline_parallel_schedule:tt", "parallel.schedule", "schedule = {}", "one_f_one_b"),
    Row("num_gpus_per_node:ds gpus_per_node:hf nproc_per_node:mg", "cluster.level", 'level "node" { size = {} }', "8"),
    Row("num_nodes:mg,ds nnodes:mg", "cluster.level", 'level "rail" { size = {} }', "4", 'after `level "node" { size = 8 }`, which joins the devices of a node; with `from = dgx_h100` it is `nodes = …`'),
    Row("num_gpus:ds world_size:fm,mg n_gpu:hf n_gpus:ot gpus:pl devices:pl num_devices:pl", "", "", "", 'leave it out: the ranks are declared, `cluster "mine" { device = h100; level "node" { size = 8 } }`, the product of its levels; without a `cluster` there is one rank'),
    Row("a2a_ffn_overlap_degree:tu", "adapt.overlap", "adapt { overlap = {} }", "2"),
    Row("use_2dh:tu", "adapt.all_to_all", "adapt { all_to_all = hierarchical }", "", but=_off()),
    Row("adaptive_r:tu parallel_type:tu", "adapt.parallelism", "adapt { parallelism = {} }", "1"),
)

_NOWHERE = (
    Row("hidden_dropout:hf,mg hidden_dropout_prob:hf attention_dropout:hf,mg resid_pdrop:hf attn_pdrop:hf embd_pdrop:hf dropout:hf resid_dropout:hf", "", "", "", "moec has no dropout: leave it out"),
    Row("add_bias_linear:mg disable_bias_linear:mg mlp_bias:hf use_bias:hf", "", "", "", "a bias is said where it is: `swiglu(14_336, bias = true)`, `gqa(…, bias = all)`; there is none by default"),
    Row("initializer_range:hf init_method_std:mg init_std:tt", "", "", "", "weights begin with a standard deviation of 0.02, outputs into the residual stream with 0.02 / sqrt(2 * depth); other values are loaded, or set in the training script"),
    Row("mup_base_hidden_size:hf", "", "", "", "moec has no µP: initial values and learning rates are set in the training script"),
    Row("top2_2nd_expert_sampling:ds", "", "", "", "no gate here adds noise before the second choice: `gate = topk(2, normalize = true)` is DeepSpeed's with `False`"),
    Row("warmup_steps:hf,tt lr_warmup_iters:mg lr_decay_style:mg lr_scheduler:hf,tt lr_scheduler_type:hf num_warmup_steps:hf warmup_ratio:hf warmup:hf min_lr:mg lr_decay_iters:mg scheduler:ds lr_schedule:ot schedule_type:ot", "", "", "", "a schedule is in the training script, by a scheduler of `torch.optim.lr_scheduler`; `optimizer = adamw(lr = …)` has the rate it begins with"),
    Row("manual_seed:pt data_seed:hf random_seed:ot", "", "", "", "leave it out: the seed is the script's, `job.build(seed={})`, with the same weights on any number of ranks"),
    Row("use_fp16:ot", "", "", "", "leave it out: moec does not train in fp16 yet, and `dtype = bf16` in `model` is the default", but=_off("leave it out: `dtype = bf16` in `model` is the default")),
    Row("use_fp32:ot", "", "", "", "write `dtype = fp32` in `model`", but=_off("leave it out: `dtype = bf16` in `model` is the default")),
    Row("device_memory:ot", "", "", "", 'a device of your own has it: `device "mine" { kind = cpu; memory = {}; bandwidth = 20GB/s }` outside, and `device = mine` in `cluster`'),
    Row("dense_ffn:ot", "", "", "", "a layer without experts has `ffn = swiglu(WIDTH)`"),
    Row("fused:pt foreach:pt capturable:pt", "", "", "", "leave it out: moec chooses how the step is computed, and `adamw` is fused"),
    Row("make_vocab_size_divisible_by:mg", "", "", "", "moec pads no vocabulary: `vocab` is the number of rows of the embedding and of the head; write the padded number where weights from Megatron have it"),
    Row("recompute_method:mg recompute_num_layers:mg", "", "", "", "each layer is computed again by itself, as with Megatron's `uniform` and one layer; `parallel { layers 8..31 { recompute = layer } }` chooses layers"),
    Row("clip_grad:mg max_grad_norm:hf gradient_clipping:ds max_norm:tt grad_clip:hf clip_norm:ot clipping:ot", "", "", "", "leave it out: gradients are clipped in the training script, by `job.clip_grad_norm_(model, {})` between `job.step` and `optimizer.step()`; what Adafactor bounds is `adafactor(clip = …)`"),
    Row("train_iters:mg train_samples:mg max_steps:hf num_train_epochs:hf num_epochs:hf epochs:hf steps:tt total_steps:hf", "", "", "", "how long to train is in the training script"),
    Row("overlap_comm:ds transformer_impl:mg contiguous_gradients:ds reduce_bucket_size:ds allgather_bucket_size:ds", "", "", "", "leave it out: the plan has its own collectives, and kernels are moec's"),
    Row("attention_mask:hf", "", "", "", "padding is `embedding = tokens(padding = given)` in the file, and `padding=attention_mask == 0` of `job.step` and `model`"),
    Row("lm_head:hf output_layer:mg", "", "", "", "every model has its head, `head.weight`; `embedding = tokens(tied = true)` ties it to the embedding"),
    Row("moe_grouped_gemm:mg grouped_gemm:ot flash_attention:ot flash_attn:ot dispatcher:ot token_dispatcher:ot use_grouped_mm:tt moe_permute_fusion:mg use_flash_attn:mg attn_implementation:hf use_tutel:ds fused_kernels:mg moe_token_dispatcher_type:mg moe_shared_expert_overlap:mg overlap_grad_reduce:mg overlap_param_gather:mg tp_comm_overlap:mg", "", "", "", "the compiler chooses kernels and exchanges: leave it out"),
    Row("fp32_gate:tu router_dtype:ot moe_router_dtype:mg attention_softmax_in_fp32:mg", "", "", "", "router and softmax are computed in at least fp32: leave it out; `keep_in_fp32 = [routers]` in `model` keeps the routers' weights in fp32 too"),
    Row("use_cache:hf model_type:hf architectures:hf transformers_version:hf auto_map:hf", "", "", "", "`moec import hf FOLDER` makes a .moe file of a Hugging Face model"),
    Row("tokenizer_type:mg tokenizer:hf data_path:mg dataset:tt save_interval:mg checkpoint_dir:ds log_interval:mg", "", "", "", "data, logs and checkpoints are in the training script: leave it out"),
)

ROWS: tuple[Row, ...] = (*_MODEL, *_OF_ATTENTION, *_OF_MIXTURES, *_TRAINING, *_PARALLEL, *_NOWHERE)

WORDS: dict[str, str] = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "half_bfloat16"), "bf16"),
    **dict.fromkeys(("float32", "torch.float32", "float", "single", "f32"), "fp32"),
    **dict.fromkeys(("float16", "torch.float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("True", "TRUE", "yes", "on"), "true"),
    **dict.fromkeys(("False", "FALSE", "no", "off"), "false"),
    **dict.fromkeys(("None", "null", "nil", "NULL"), "none"),
    **dict.fromkeys(("rmsnorm", "rms_norm"), "rms"),
    **dict.fromkeys(("layernorm", "ln"), "layer_norm"),
    **dict.fromkeys(("grouped_query_attention", "grouped_query"), "gqa"),
    **dict.fromkeys(("multi_head_attention", "multihead", "multi_head", "self_attention"), "mha"),
    "multi_latent_attention": "mla",
    **dict.fromkeys(("silu_glu", "swish_glu", "silu_gated"), "swiglu"),
    **dict.fromkeys(("swish",), "silu"),
    **dict.fromkeys(("squared_relu", "relu_squared", "relu^2"), "relu2"),
    **dict.fromkeys(("adam_w",), "adamw"),
    **dict.fromkeys(("top_k", "topk_router"), "topk"),
    "noisy_top_k": "noisy_topk",
    **dict.fromkeys(("router_z_loss",), "z_loss"),
    **dict.fromkeys(("capacity_factor",), "factor"),
    **dict.fromkeys(("dropless_moe", "no_drop", "nodrop", "unlimited"), "dropless"),
    **dict.fromkeys(("full", "block", "blocks"), "layer"),
    **dict.fromkeys(("1f1b",), "one_f_one_b"),
    **dict.fromkeys(("probs",), "priority"),
    **dict.fromkeys(("position",), "sequence"),
    **dict.fromkeys(("rotary",), "rope"),
}
"""Values of other systems, in lower case unless they are Python's, and the word here that means the same."""

_ADAM = "`adamw(weight_decay = 0)` is Adam without weight decay; with it, Adam and AdamW are different optimizers"
_GELU = "`gelu` here is the exact one, of the error function; moec does not have its approximation by tanh"
_ACTIVATION = "moec has `gelu`, `relu`, `relu2` and `silu`, and gated ones: `swiglu`, `geglu`"
OPTIMIZERS = (
    "moec's own are `adamw`, `sgd`, `muon` and `adafactor`; a script may take element-wise ones of `torch.optim` instead "
    "(docs/optimizers.md)"
)
_AUX_LOSS = (
    "the term is `switch_loss`; for k = 2 DeepSpeed's and Tutel's is `gshard_loss`, which counts first "
    "choices alone, and Hugging Face's weight is multiplied by k and divided by the number of layers with experts (docs/from)"
)
_FP8 = "moec does not train in 8 or 4 bits yet: write `bf16`, or `fp32`"

NEAR: dict[str, str] = {
    **dict.fromkeys(("adam", "fused_adam", "fusedadam"), _ADAM),
    **dict.fromkeys(("gelu_new", "gelu_tanh", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu"), _GELU),
    **dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "e4m3", "mxfp8", "fp4", "nvfp4"), _FP8),
    **dict.fromkeys(("seq_aux_loss", "sequence_aux_loss"), "Megatron's is `switch_loss` with `group = sequence`, DeepSeek's is `sequence_loss`"),
    **dict.fromkeys(("elu", "selu", "celu", "mish", "softplus", "tanh", "leaky_relu", "prelu", "hardswish"), _ACTIVATION),
    **dict.fromkeys(("glu", "reglu", "bilinear"), _ACTIVATION),
    **dict.fromkeys(("adamax", "nadam", "radam", "adagrad", "rmsprop", "lion", "lamb", "lars", "sophia", "shampoo", "soap"), OPTIMIZERS),
    **dict.fromkeys(("flash_attention", "flash_attn", "flash", "sdpa"), "the compiler chooses the kernel: write `gqa(heads = 32, kv_heads = 8, rope = rope())`"),
    "tf32": "TF32 is how a GPU multiplies fp32: write `fp32`, and set `torch.backends.cuda.matmul.allow_tf32` in the script",
    **dict.fromkeys(("mqa", "multi_query_attention", "multi_query"), "multi-query attention is `gqa(heads = 32, kv_heads = 1)`"),
    **dict.fromkeys(("load_balancing_loss", "aux_loss", "load_balance_loss"), _AUX_LOSS),
    **dict.fromkeys(("modulelist", "sequential"), "equal experts are a product: write `8 * swiglu(WIDTH)`"),
    "cv_loss": "the squared coefficient of variation of the experts' importance is `importance_loss`",
    "global_aux_loss": "Megatron's is `switch_loss` with `group = batch`, where a step has one micro-batch",
    "sinkhorn": "no gate here balances by Sinkhorn's iteration: `topk(1)` with `balance = [switch_loss(0.01)]` is nearest",
}
"""Values of other systems that have no equal here, and what is nearest. Nothing is replaced by itself."""

IN_BLOCKS: dict[tuple[str, str], str] = {
    **dict.fromkeys((("train", "seed"), ("model", "seed")), "manual_seed"),
    **dict.fromkeys((("train", "bf16"), ("model", "bf16")), "amp"),
    **dict.fromkeys((("train", "fp16"), ("model", "fp16")), "use_fp16"),
    **dict.fromkeys((("train", "fp32"), ("model", "fp32")), "use_fp32"),
    **dict.fromkeys((("train", "clip"), ("adamw", "clip"), ("sgd", "clip"), ("muon", "clip")), "clipping"),
    **dict.fromkeys((("train", "schedule"), ("train", "cosine"), ("train", "linear")), "lr_schedule"),
    **dict.fromkeys((("train", "accumulation"), ("train", "accumulate")), "gradient_accumulation_steps"),
    ("cluster", "memory"): "device_memory",
    ("layers", "dense"): "dense_ffn",
    ("model", "dense"): "dense_layers",
}
"""Words of this language that mean something of another system in a block which does not have them: its name above."""
