"""Names of transformers' `config.json` files and of `TrainingArguments`. A name can mean other numbers in other models."""

from __future__ import annotations

from moec.grammar.foreign.row import ADAMW, ATTENTION, GATE, GQA, MLA, MLA_FORM, MOE, ROPE, SWITCH_LOSS, Row, off

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_QWEN = "models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeTopKRouter.forward"
_MIXTRAL = "models/mixtral/modeling_mixtral.py, MixtralTopKRouter.forward"
_GPT_OSS = "models/gpt_oss/modeling_gpt_oss.py, GptOssTopKRouter.forward"
_GRANITE = "models/granitemoe/modeling_granitemoe.py, GraniteMoeTopKRouter.forward"
_V3 = "models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3TopkRouter.forward"
_V2 = "models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2TopkRouter.forward"
_LOSS = "models/mixtral/modeling_mixtral.py, load_balancing_loss_func"
_TRAINER = "trainer.py, Trainer.compute_loss"
_ARGUMENTS = "training_args.py, TrainingArguments"
_MLA = "models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3Attention"
_FALSE = "False in Qwen2-MoE, Qwen3-MoE, OLMoE and DeepSeek-V2 unless their config says otherwise, True in most others; Mixtral, gpt-oss and Granite have no such name, and their weights always add to 1"
_V3_FORM = "gate = topk(8, score = sigmoid, normalize = true, bias = online(1e-3)"
_OF_FAMILIES = (
    ("in Qwen, OLMoE, Jamba and DeepSeek-V2 without `norm_topk_prob`", "gate = topk({})"),
    ("in Granite and JetMoe", "gate = topk({}, order = after)"),
    ("in gpt-oss", "gate = topk({}, order = after, bias = learned)"),
    ("in DeepSeek-V3 and GLM-4.5", "gate = topk({}, score = sigmoid, normalize = true, bias = online(1e-3))"),
    ("in ERNIE-4.5", "gate = topk({}, normalize = true, bias = online(1e-3))"),
    ("in Phi-3.5-MoE", "gate = sparsemixer({})"),
)
_TRAINERS = "under `Trainer` WEIGHT is {} * k times the accumulated micro-batches and processes: the whole loss is multiplied by the number of processes, and not divided by that of micro-batches"
_POOLED = "the tokens of all layers together, as there; with biases or groups `fractions = scores` too, as transformers takes the fractions of plain top-k"
_JITTER = "it multiplies what the experts get, too, and here what the router gets alone"
_IMPORT = "`moec import hf FOLDER` makes a .moe file of a Hugging Face model"
_NO_LOSS = "transformers' own classes have no such loss; in DeepSeek's remote code "
_DENSE = "write `layers {} {{ ffn = swiglu(WIDTH) }}` in `model`, after the `layers` block for all layers"

_MODEL = (
    Row("rms_norm_eps", "model.norm.rms.eps", "norm = rms(eps = {})", "1e-5", "", "models/mixtral/modeling_mixtral.py, MixtralRMSNorm; models/phimoe/modeling_phimoe.py, PhimoeDecoderLayer", cases=(("in Phi-3.5-MoE", "norm = layer_norm(eps = {})"),)),
    Row("layer_norm_eps layer_norm_epsilon", "model.norm.layer_norm.eps", "norm = layer_norm(eps = {})", "1e-5", "", "models/gpt2/modeling_gpt2.py, GPT2Block; models/cohere/modeling_cohere.py, CohereLayerNorm", cases=(("in Cohere, whose norm has no shift", "norm = layer_norm(eps = {}, bias = false)"),)),
    Row("norm_type", "model.norm", "norm = {}", "rms(eps = 1e-5)"),
    Row("position_embedding_type", f"{GQA}.rope", "attention = mha(heads = 32, rope = rope())", "", "without either there are none", "models/bert/modeling_bert.py, BertEmbeddings", "for `rotary`", (("for `absolute`", "embedding = tokens(positions = learned)"),)),
    Row("pad_token_id", "model.embedding.tokens.padding", "embedding = tokens(padding = {})", "0", "only where padding must go to no expert; else leave it out", _LOSS, differs="padding goes to experts there; `attention_mask` keeps it out of attention and of the auxiliary loss", renames=False, but=off()),
    Row("eos_token_id bos_token_id", "model.embedding.tokens.separator", "embedding = tokens(separator = {})", "2", "only where several texts are packed in a sequence; else leave it out", renames=False, but=off()),
    Row("embedding_multiplier", "model.embedding.tokens.multiplier", "embedding = tokens(multiplier = {})", "12.0", "", "models/granitemoe/modeling_granitemoe.py, GraniteMoeModel.forward", convert=True),
    Row("logits_scaling", "model.embedding.tokens.logits_multiplier", "embedding = tokens(logits_multiplier = 1 / {})", "6", "", "models/granitemoe/modeling_granitemoe.py, GraniteMoeForCausalLM.forward", renames=False),
    Row("initializer_range", "", "", "", "new weights have a standard deviation of 0.02, outputs into the residual stream 0.02 / sqrt(2 * depth), where transformers has 0.02 everywhere; others are loaded", "modeling_utils.py, PreTrainedModel._init_weights"),
    Row("hidden_dropout hidden_dropout_prob attention_dropout resid_pdrop attn_pdrop embd_pdrop emb_pdrop dropout resid_dropout", "", "", "", "moec has no dropout: leave it out"),
    Row("mlp_bias use_bias", "", "", "", "a bias is said where it is: `swiglu(14_336, bias = true)`, `gqa(…, bias = all)`; there is none by default"),
    Row("attention_mask", "", "", "", "padding is `embedding = tokens(padding = given)` in the file, and `padding=attention_mask == 0` of `job.step` and `model`"),
    Row("use_cache model_type architectures transformers_version auto_map", "", "", "", _IMPORT),
)

_OF_ATTENTION = (
    Row("num_attention_heads n_head num_heads", f"{ATTENTION}.mha.heads", "attention = mha(heads = {}, rope = rope())", "32", "with fewer key and value heads, both numbers go into one `gqa`; without `rope` there are no positions", "models/mixtral/modeling_mixtral.py, MixtralAttention", "where positions are rotary"),
    Row("num_key_value_heads num_kv_heads", f"{GQA}.kv_heads", "attention = gqa(heads = 32, kv_heads = {}, rope = rope())", "8", "`heads` is your number of attention heads", "models/mixtral/modeling_mixtral.py, MixtralAttention"),
    Row("attention_head_dim", f"{GQA}.head_dim", "attention = gqa(heads = 32, kv_heads = 8, head_dim = {}, rope = rope())", "128", "", but=off()),
    Row("rope_theta rotary_emb_base", f"{ROPE}.theta", "rope = rope(theta = {})", "1e6", "", "models/mixtral/modeling_mixtral.py, apply_rotary_pos_emb", cases=(("in DeepSeek, GLM-4, Cohere and ERNIE, which turn neighbours", "rope = rope(theta = {}, interleaved = true)"),)),
    Row("partial_rotary_factor rotary_pct", f"{ROPE}.fraction", "rope = rope(fraction = {})", "0.5", "", "models/glm4_moe/modeling_glm4_moe.py, apply_rotary_pos_emb; models/glm4/modeling_glm4.py, apply_rotary_pos_emb", cases=(("in GLM-4, which turns neighbours", "rope = rope(fraction = {}, interleaved = true)"),)),
    Row("rope_scaling rope_parameters rope_type", f"{ROPE}.scaling", "rope = rope(scaling = yarn(4, original = 4096))", "", "scalings are `linear`, `ntk` for `dynamic`, `yarn`, `llama3` and `longrope`", "modeling_rope_utils.py, ROPE_INIT_FUNCTIONS", but=off()),
    Row("rope_interleave", f"{ROPE}.interleaved", "rope = rope(interleaved = {})", "true", "True is the default of DeepSeek-V3", _MLA, convert=True),
    Row("sliding_window", f"{GQA}.window", "attention = gqa(heads = 32, kv_heads = 8, window = {}, rope = rope())", "4096", "a token counts itself, in both; Qwen has no window unless `use_sliding_window`", "masking_utils.py, sliding_window_overlay", but=off()),
    Row("use_qk_norm", f"{GQA}.qk_norm", "attention = gqa(heads = 32, kv_heads = 8, qk_norm = head, rope = rope())", "", "Llama 4's has no weight, Cohere's is a layer norm: no equal", "models/glm4_moe/modeling_glm4_moe.py, Glm4MoeAttention", "in GLM-4.5", renames=False, but=off()),
    Row("qk_layernorm", "", "", "", "no equal: in Phi, Persimmon and StableLM it is a layer norm with a mean, and `qk_norm` is an RMS norm", "models/phi/modeling_phi.py, PhiAttention"),
    Row("attention_bias", f"{GQA}.bias", "attention = gqa(heads = 32, kv_heads = 8, bias = all, rope = rope())", "", "`qkv` where the output projection has none, as in Qwen2", "models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeAttention", renames=False, but=off()),
    Row("qkv_bias", f"{GQA}.bias", "attention = gqa(heads = 32, kv_heads = 8, bias = qkv, rope = rope())", "", "`all` for the output projection too", "models/qwen2_moe/modeling_qwen2_moe.py, Qwen2MoeAttention", renames=False, but=off()),
    Row("attention_multiplier", f"{GQA}.multiplier", "attention = gqa(heads = 32, kv_heads = 8, multiplier = {}, rope = rope())", "0.125", "", "models/granitemoe/modeling_granitemoe.py, GraniteMoeAttention", but=off()),
    Row("clip_qkv", f"{GQA}.clip", "attention = gqa(heads = 32, kv_heads = 8, clip = {}, rope = rope())", "8.0", "", "models/olmoe/modeling_olmoe.py, OlmoeAttention.forward", but=off()),
    Row("q_lora_rank", f"{MLA}.q_rank", MLA_FORM.replace("kv_rank", "q_rank = {}, kv_rank"), "1536", "", _MLA, but=off()),
    Row("kv_lora_rank", f"{MLA}.kv_rank", MLA_FORM.replace("512", "{}"), "512", "norms of the latent vectors have `latent_eps = 1e-6` there, whatever `rms_norm_eps` is", _MLA),
    Row("qk_nope_head_dim", f"{MLA}.nope_dim", MLA_FORM.replace("nope_dim = 128", "nope_dim = {}"), "128", "", _MLA),
    Row("qk_rope_head_dim", f"{MLA}.rope_dim", MLA_FORM.replace("64", "{}"), "64", "", _MLA),
    Row("v_head_dim", f"{MLA}.value_dim", MLA_FORM.replace("value_dim = 128", "value_dim = {}"), "128", "", _MLA),
)

_OF_EXPERTS = (
    Row("intermediate_size n_inner d_ff", "model.layers.ffn.swiglu.hidden", "ffn = swiglu({})", "14_336", "`gelu`, `relu`, … for another activation; of an expert, as in Mixtral, it is in `experts = 8 * swiglu({})`", "models/mixtral/modeling_mixtral.py, MixtralExperts"),
    Row("moe_intermediate_size expert_ffn_hidden_size", f"{MOE}.experts.swiglu.hidden", "experts = 8 * swiglu({})", "14_336", "`gelu`, `relu`, … for another activation", "models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeExperts"),
    Row("hidden_act activation_function hidden_activation", "model.layers.ffn", "ffn = swiglu(14_336)", "", "the activation is the word of the call: `gelu`, `relu`, `relu2`, `silu`, `geglu`; `gelu_new` and `gelu_pytorch_tanh` are the form by tanh, which moec does not have", "activations.py, ACT2CLS", "for `silu` of a gated layer"),
    Row("swiglu_limit", f"{MOE}.experts.swiglu.clamp", "experts = 8 * swiglu(14_336, clamp = {}, alpha = 1.702, bias = true)", "7.0", "", "models/gpt_oss/modeling_gpt_oss.py, GptOssExperts", "in gpt-oss", (("in GLM-5", "experts = 8 * swiglu(14_336, clamp = {})"),), renames=False),
    Row("n_shared_experts num_shared_experts moe_num_shared_experts", f"{MOE}.shared", "shared = swiglu(2816)", "", "WIDTH is the number of shared experts times the width of one", "models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3MoE", but=off()),
    Row("shared_expert_intermediate_size", f"{MOE}.shared.swiglu.hidden", "shared = swiglu({}, gated = true)", "2816", "Qwen2-MoE's shared expert has a gate; without one `shared = swiglu(2816)`", "models/qwen2_moe/modeling_qwen2_moe.py, Qwen2MoeSparseMoeBlock", renames=False, but=off()),
    Row("first_k_dense_replace num_dense_layers", "model.layers.ffn", "layers 0..2 { ffn = swiglu(18_432) }", "", "that is the first three layers; a later `layers` block replaces what it names", "models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3DecoderLayer", but=off() | {"1": _DENSE.format("0")} | {str(k): _DENSE.format(f"0..{k - 1}") for k in range(2, 9)}),
    Row("decoder_sparse_step encoder_sparse_step", MOE, "layers 1..31 step 2 { moe { … } }", "", "that is every second layer, from layer 1, for 2; a later `layers` block replaces what it names", "models/qwen2_moe/modeling_qwen2_moe.py, Qwen2MoeDecoderLayer", but={"1": "leave it out: `moe` in `layers { … }` is in every layer"}),
    Row("moe_layer_freq", MOE, "layers 0..30 step 2 { moe { … } }", "", "every second layer for 2, in DeepSeek's remote code: transformers' own classes do not read it", "models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2DecoderLayer", but={"1": "leave it out: `moe` in `layers { … }` is in every layer"}),
    Row("mlp_only_layers", "model.layers.ffn", "layers [0, 5] { ffn = swiglu(18_432) }", "", "a later `layers` block replaces what it names", "models/qwen2_moe/modeling_qwen2_moe.py, Qwen2MoeDecoderLayer", but=off()),
)

_OF_GATES = (
    Row("num_experts_per_tok moe_top_k moe_topk moe_k", f"{GATE}.k", "gate = topk({}, normalize = true)", "2", _IMPORT, f"{_MIXTRAL}; {_QWEN}; {_GRANITE}; {_GPT_OSS}; {_V3}", "in Mixtral, MiniMax, Hunyuan and DBRX, and with `norm_topk_prob`", _OF_FAMILIES, renames=False),
    Row("norm_topk_prob", f"{GATE}.normalize", "gate = topk(2, normalize = {})", "true", _FALSE, _QWEN),
    Row("moe_normalize_expert_weights", f"{GATE}.normalize", "gate = topk(2, normalize = true)", "", "for 1, DBRX's default; another norm has no equal", "models/dbrx/modeling_dbrx.py, DbrxFFN.route_tokens_to_experts", renames=False, but=off("write `gate = topk(K)`, whose weights are not divided")),
    Row("scoring_func", f"{GATE}.score", "gate = topk(2, score = {})", "sigmoid", "`sqrtsoftplus` of DeepSeek-V4 has no equal", _V3, but={"sqrtsoftplus": "no equal: `score` is `softmax` or `sigmoid`"}),
    Row("routed_scaling_factor", f"{GATE}.scale", "gate = topk(2, scale = {})", "2.5", "after the division by their sum, in both", _V3),
    Row("n_group", f"{GATE}.groups", _V3_FORM + ", groups = {}, keep_groups = 4)", "8", "`topk_method = greedy`, DeepSeek-V2's default, ignores groups", f"{_V3}; {_V2}", "in DeepSeek-V3 and GLM-4.5, by a group's two best", (("in DeepSeek-V2 with `topk_method = group_limited_greedy`", "gate = topk(8, groups = {}, keep_groups = 3, group_score = max)"),), renames=False, but=off()),
    Row("topk_group", f"{GATE}.keep_groups", _V3_FORM + ", groups = 8, keep_groups = {})", "4", "`topk_method = greedy`, DeepSeek-V2's default, ignores groups", f"{_V3}; {_V2}", "in DeepSeek-V3 and GLM-4.5, by a group's two best", (("in DeepSeek-V2 with `topk_method = group_limited_greedy`", "gate = topk(8, groups = 8, keep_groups = {}, group_score = max)"),), renames=False, but=off()),
    Row("topk_method", f"{GATE}.group_score", "gate = topk(8, groups = 8, keep_groups = 3, group_score = max)", "", "", _V2, "for `group_limited_greedy`", (("for `greedy`, DeepSeek-V2's default", "gate = topk(6)"), ("for `noaux_tc`", _V3_FORM + ", groups = 8, keep_groups = 4)"))),
    Row("use_expert_bias", f"{GATE}.bias", "gate = topk(8, score = sigmoid, normalize = true, bias = online(1e-3))", "", "transformers does not move the biases: `online` does, in training", "models/lfm2_moe/modeling_lfm2_moe.py, Lfm2MoeTopKRouter.forward", renames=False, but=off()),
    Row("router_jitter_noise", f"{GATE}.jitter", "gate = topk(2, normalize = true, jitter = {})", "0.01", "in Phi-3.5-MoE it is another thing: `gate = sparsemixer(2, jitter = {})`", "models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock.forward; models/phimoe/modeling_phimoe.py, sparsemixer", "in Mixtral", differs=_JITTER, renames=False, but=off()),
    Row("input_jitter_noise", "", "", "", "no equal: Phi-3.5-MoE multiplies what its router and experts get; the `jitter` of `sparsemixer` is its `router_jitter_noise`", "models/phimoe/modeling_phimoe.py, PhimoeSparseMoeBlock.forward"),
    Row("moe_jitter_eps", f"{GATE}.jitter", "gate = topk(2, normalize = true, jitter = {})", "0.01", "", "models/dbrx/modeling_dbrx.py, DbrxRouter.forward", "in DBRX", differs=_JITTER, renames=False, but=off()),
    Row("router_aux_loss_coef aux_loss_coef moe_loss_weight", SWITCH_LOSS, "balance = [switch_loss(WEIGHT, over = model)]", "COEFFICIENT", f"WEIGHT is {{}} * k, for k experts per token, over a process's tokens of a micro-batch: `group = batch` for one process, `group = rank` for several; {_POOLED}; none without `output_router_logits`, False by default; {_TRAINERS}", f"{_LOSS}; {_TRAINER}", renames=False, but=off()),
    Row("output_router_logits", "", "", "", "leave it out: a term of `balance` is always in the loss. Without it, the default, transformers adds no auxiliary loss in training", "models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeForCausalLM.forward", but=off("leave it out, and `balance` too: transformers then adds no auxiliary loss")),
    Row("router_z_loss_coef", f"{MOE}.balance.z_loss.weight", "balance = [z_loss(WEIGHT)]", "COEFFICIENT", "WEIGHT is {} / L for L layers with experts: Switch Transformers and NLLB take the mean over the tokens of all layers of the encoder, and of the decoder", "models/switch_transformers/modeling_switch_transformers.py, router_z_loss_func and _unpack_router_logits", renames=False, but=off()),
    Row("aux_loss_alpha", SWITCH_LOSS, "balance = [switch_loss({})]", "0.01", _NO_LOSS + "the term is 1 for equal loads, over a process's tokens: `group = rank`; with `seq_aux` it is `sequence_loss({})`", "models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2ForCausalLM.forward", renames=False, but=off()),
    Row("seq_aux", f"{MOE}.balance.sequence_loss.weight", "balance = [sequence_loss(1e-4)]", "", _NO_LOSS + "the weight is `aux_loss_alpha`", "models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2ForCausalLM.forward", but=off()),
    Row("expert_capacity", f"{MOE}.capacity", "capacity = factor(1.25)", "", "a multiple of an equal share, not a number of tokens: expert_capacity * experts / tokens of a sequence; counted over a sequence, in both", "models/switch_transformers/modeling_switch_transformers.py, SwitchTransformersTop1Router.forward", renames=False),
)

_TRAINING = (
    Row("adam_beta1", f"{ADAMW}.beta1", "optimizer = adamw(beta1 = {})", "0.9", "", _ARGUMENTS),
    Row("adam_beta2", f"{ADAMW}.beta2", "optimizer = adamw(beta2 = {})", "0.95", "0.999 is their default, 0.95 ours", _ARGUMENTS),
    Row("adam_epsilon", f"{ADAMW}.eps", "optimizer = adamw(eps = {})", "1e-8", "", _ARGUMENTS),
    Row("weight_decay", f"{ADAMW}.weight_decay", "optimizer = adamw(weight_decay = {})", "0.01", "0 is their default, 0.1 ours; neither decays biases and norms", _ARGUMENTS),
    Row("average_tokens_across_devices num_items_in_batch", "", "", "", "leave it out: moec always divides by all labels of a step, over all ranks and micro-batches, as `Trainer` does with it", _TRAINER),
)

ROWS: tuple[Row, ...] = (*_MODEL, *_OF_ATTENTION, *_OF_EXPERTS, *_OF_GATES, *_TRAINING)
