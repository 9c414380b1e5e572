"""Names that mean the same in every system that has them: sizes, degrees, what a training script does.

Each name has `:` and the keys of its systems behind it.
"""

from __future__ import annotations

from moec.grammar.foreign.row import ADAMW, ATTENTION, GQA, MOE, ROPE, SWITCH_LOSS, Row, off
from moec.grammar.foreign.values import HUGGING_FACE_AUX_LOSS
from moec.grammar.spec.optimizers import AdamW

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_RANKS = 'leave it out: the ranks are declared, `cluster "mine" { device = h100; level "node" { size = 8 } }`, the product of its levels; without a `cluster` there is one rank'
_SCHEDULE = "a schedule is in the training script, by a scheduler of `torch.optim.lr_scheduler`; `optimizer = adamw(lr = …)` has the rate it begins with"
_CLIPPING = "leave it out: gradients are clipped in the training script, by `job.clip_grad_norm_(model, {})` between `job.step` and `optimizer.step()`; what Adafactor bounds is `adafactor(clip = …)`. Megatron, torchtitan and `Trainer` clip at 1.0 unless told"
_AUX_LOSS = f"that is Megatron's and Switch's term. Where a token has two experts, DeepSpeed's and Tutel's count the first alone: `gshard_loss({{}})`; {HUGGING_FACE_AUX_LOSS}"
_FP16 = "moec does not train in fp16 yet: write `dtype = bf16` in `model`"
_FP32 = "write `dtype = fp32` in `model`: bf16 is the default"

ROWS: tuple[Row, ...] = (
    Row("hidden_size:hf,mg,ds n_embd:hf d_model:hf,fm model_dim:tu dim_model:ot dmodel:ot hidden_dim:ot", "model.dim", "dim = {}", "4096"),
    Row("num_hidden_layers:hf num_layers:hf,mg,ds n_layer:hf n_layers:hf,tt nlayers:ot", "model.depth", "depth = {}", "32"),
    Row("vocab_size:hf,tt padded_vocab_size:mg n_vocab:ot vocabulary_size:ot", "model.vocab", "vocab = {}", "32_000"),
    Row("max_position_embeddings:hf,mg n_positions:hf n_ctx:hf max_seq_len:tt max_context_length:tt context_length:ot block_size:ot", "model.context", "context = {}", "4096"),
    Row("torch_dtype:hf params_dtype:mg training_dtype:tt param_dtype:ot compute_dtype:ot", "model.dtype", "dtype = {}", "bf16", "of computation; parameters that train are fp32"),
    Row("precision:pl", "model.dtype", "dtype = bf16", "", "that is Lightning's `bf16-mixed`; `fp32` is its `32-true`, and moec does not train in fp16 yet"),
    Row("amp:ds autocast:pt mixed_precision:hf", "model.dtype", "dtype = {}", "bf16", "parameters and optimizer stay fp32 beside it: `master = fp32` in `train`", but=off(_FP32, no=_FP32, fp16=_FP16, **dict.fromkeys(("true", "yes", "on"), "write `dtype = bf16` in `model`, or leave it out: that is the default"))),
    Row("bf16:mg,hf,ds", "model.dtype", "dtype = bf16", "", "the default; parameters that train are fp32"),
    Row("rms_eps:ot", "model.norm.rms.eps", "norm = rms(eps = {})", "1e-5", convert=True),
    Row("tie_word_embeddings:hf share_embeddings_and_output_weights:mg tie_embeddings:ot", "model.embedding.tokens.tied", "embedding = tokens(tied = {})", "true", convert=True),
    Row("image_size:hf", "model.embedding.patches.image", "embedding = patches(image = {}, size = 16)", "224"),
    Row("patch_size:hf", "model.embedding.patches.size", "embedding = patches(image = 224, size = {})", "16"),
    Row("num_labels:hf", "model.head.classes.count", "head = classes({})", "1000", convert=True),
    # ---- experts ---------------------------------------------------------------------------------------
    Row("num_experts:hf,mg,ds,tt num_local_experts:hf n_routed_experts:hf moe_num_experts:hf num_moe_experts:mg n_experts:ot num_global_experts:tu", f"{MOE}.experts.count", "experts = {} * swiglu(14_336)", "8", "all of a layer; the width of one expert stands after the number"),
    Row("num_expert:fm fmoe_num_experts:fm num_experts_per_device:tu count_per_node:tu num_local_expert:ot", f"{MOE}.experts.count", "experts = 8 * gelu(14_336, bias = true)", "", "the number is that of all experts of a layer, not of one device's; `ep` says over how many ranks they lie"),
    Row("router:hf,tt", f"{MOE}.gate", "gate = topk(2)", "", "other gates are `switch`, `expert_choice`, `soft`, …: `moec explain gate`; what a system's option means in numbers: `moec explain OPTION`"),
    Row("mlp:hf,mg feed_forward:tt", "model.layers.ffn", "ffn = swiglu(14_336)", "", "of experts it is `experts = 8 * swiglu(14_336)` in `moe`"),
    Row("router_topk:ot num_active_experts:ot active_experts:ot", f"{MOE}.gate.topk.k", "gate = topk({})", "2", "the weights of a token's choices are then its probabilities; where they add to 1, `gate = topk({}, normalize = true)`", renames=False, but={"1": "write `gate = topk(1)`"}),
    Row("dense_layers:ot", "model.layers.ffn", "layers 0..2 { ffn = swiglu(18_432) }", "", "that is the first three layers; a later `layers` block replaces what it names", but=off() | {"1": "write `layers 0 { ffn = swiglu(WIDTH) }` in `model`, after the `layers` block for all layers"} | {str(k): f"write `layers 0..{k - 1} {{ ffn = swiglu(WIDTH) }}` in `model`, after the `layers` block for all layers" for k in range(2, 9)}),
    Row("aux_loss:ot aux_loss_weight:ot load_balancing_loss_coef:ot load_balancing_loss:ot load_balance_loss:ot", SWITCH_LOSS, "balance = [switch_loss({})]", "0.01", _AUX_LOSS, renames=False, but=off()),
    Row("z_loss_coef:ot router_z_loss_weight:ot", f"{MOE}.balance.z_loss.weight", "balance = [z_loss({})]", "1e-3", but=off()),
    Row("seq_aux_loss_coef:ot", f"{MOE}.balance.sequence_loss.weight", "balance = [sequence_loss({})]", "1e-4", but=off()),
    Row("jitter_noise:ot", f"{MOE}.gate.topk.jitter", "gate = topk(2, jitter = {})", "0.01", "of the router's input, in training", renames=False, but=off()),
    Row("router_noise:ot", f"{MOE}.gate.topk.noise", "gate = topk(2, noise = {})", "1.0", "Gaussian, added to the logits in training", renames=False, but=off()),
    Row("score_function:ot", f"{MOE}.gate.topk.score", "gate = topk(2, score = {})", "sigmoid"),
    Row("router_type:ot", f"{MOE}.gate", "gate = topk(2)", "", "other gates are `switch`, `expert_choice`, `soft`, …: `moec explain gate`"),
    Row("expert_capacity_factor:ot", f"{MOE}.capacity.factor.factor", "capacity = factor({})", "1.25", "what a system's number means: `moec explain capacity_factor`", renames=False, but=off("leave it out: without a capacity no token is dropped")),
    Row("token_dropping:ot", f"{MOE}.capacity", "capacity = factor(1.25)", "", "full experts then drop tokens", but=off("write `capacity = dropless()`, the default: no token is dropped")),
    Row("use_shared_expert_gate:ot", f"{MOE}.shared.swiglu.gated", "shared = swiglu(2816, gated = true)", "", but=off()),
    Row("shared_expert:ot", f"{MOE}.shared", "shared = swiglu(2816)", "", "WIDTH is the number of shared experts times the width of one", but=off()),
    # ---- attention -------------------------------------------------------------------------------------
    Row("rope_base:ot", f"{ROPE}.theta", "rope = rope(theta = {})", "1e6", "with `interleaved = true` where neighbours turn"),
    Row("head_size:ot d_head:ot", f"{GQA}.head_dim", "attention = gqa(heads = 32, kv_heads = 8, head_dim = {}, rope = rope())", "128", but=off()),
    Row("nheads:ot", f"{ATTENTION}.mha.heads", "attention = mha(heads = {}, rope = rope())", "32", "without `rope` there are no positions"),
    # ---- training --------------------------------------------------------------------------------------
    Row("seq_len:tt seq_length:mg,ds sequence_length:ot max_length:hf max_seq_length:hf seqlen:ot max_len:ot", "train.sequence", "sequence = {}", "4096"),
    Row("global_batch_size:mg,tt global_batch:ot train_batch_size:ds", "train.batch", "batch = {}", "1024", "sequences per step, over all ranks"),
    Row("micro_batch_size:mg train_micro_batch_size_per_gpu:ds per_device_train_batch_size:hf local_batch_size:tt micro_batch:ot", "parallel.microbatches", "microbatches = 4", "", "how many micro-batches there are: a data-parallel rank's part of `batch`, divided by the size of a micro-batch"),
    Row("gradient_accumulation_steps:hf,ds num_microbatches:mg num_micro_batches:ot grad_accum:ot accumulation_steps:ot accumulate_grad_batches:pl gradient_accumulation:ot", "parallel.microbatches", "microbatches = {}", "4"),
    Row("learning_rate:hf", f"{ADAMW}.lr", "optimizer = adamw(lr = {})", "3e-4", AdamW.elsewhere),
    Row("betas:hf,ds", f"{ADAMW}.beta1", "optimizer = adamw(beta1 = 0.9, beta2 = 0.95)", "", "each has a name of its own"),
    Row("epsilon:ot", f"{ADAMW}.eps", "optimizer = adamw(eps = {})", "1e-8"),
    Row("wd:ot", f"{ADAMW}.weight_decay", "optimizer = adamw(weight_decay = {})", "0.1"),
    Row("use_distributed_optimizer:mg", "parallel.zero", "zero = 1", "", "masters and optimizer states are cut over the data-parallel ranks", but=off()),
    Row("master_weights:ot main_params_dtype:mg", "train.master", "master = fp32", "", "that is the default"),
    # ---- degrees ---------------------------------------------------------------------------------------
    Row("tensor_model_parallel_size:mg tensor_parallel_degree:tt tensor_parallel_size:ot,ds tensor_parallel:ot tp_size:hf,ds", "parallel.tp", "tp = {}", "2", but={"true": "write its degree, `tp = 2`"}),
    Row("expert_model_parallel_size:mg expert_parallel_degree:tt expert_parallel_size:hf,ds expert_parallel:ot ep_size:ds moe_expert_parallel_size:ds", "parallel.ep", "ep = {}", "8", but={"true": "write its degree, `ep = 8`"}),
    Row("pipeline_model_parallel_size:mg pipeline_parallel_degree:tt pipeline_parallel_size:ot pipeline_parallel:ot pp_size:ds num_stages:ds", "parallel.pp", "pp = {}", "2", "", but={"true": "write its degree, `pp = 2`"}),
    Row("num_virtual_stages_per_pipeline_rank:mg virtual_pipeline_model_parallel_size:mg vpp:ot vpp_size:ot", "parallel.virtual", "virtual = {}", "2", "beside `schedule = interleaved`"),
    Row("num_layers_per_virtual_pipeline_stage:mg pipeline_parallel_layers_per_stage:tt", "parallel.virtual", "virtual = 2", "", "beside `schedule = interleaved`; the number of layers, divided by `pp` times this number"),
    Row("pipeline_model_parallel_layout:mg decoder_first_pipeline_num_layers:mg decoder_last_pipeline_num_layers:mg", "parallel.stages", "stages = [0..2, 3..7]", "", "the layers of each of the `pp * virtual` stages; the embedding is on the first one, the head on the last", but=off()),
    Row("sp:ot", "parallel.sequence_parallel", "sequence_parallel = {}", "true", "the default where `tp` is above 1"),
    Row("context_parallel_size:mg context_parallel:ot context_parallel_degree:tt cp_size:hf,ot", "parallel.cp", "cp = {}", "2", "by heads, as Ulysses and Megatron's `--cp-comm-type a2a`; `cp * tp` divides the heads", but={"true": "write its degree, `cp = 2`"}),
    Row("sequence_parallel_size:ds ds_sequence_parallel_size:ds sp_size:hf ulysses_degree:ot", "parallel.cp", "cp = {}", "2", "Ulysses: around attention each rank has all tokens of some heads; not `sequence_parallel`, which is of `tp`"),
    Row("expert_tensor_parallel_size:mg", "parallel.etp", "etp = {}", "2", "left out it is `tp` in Megatron, 1 here; `layers 4..31 { etp = 2 }` in `parallel` is for some layers alone"),
    Row("expert_tensor_parallel_degree:tt", "parallel.etp", "etp = {}", "2", "any divisor of the ranks, whatever `tp`; left out it is 1"),
    Row("enable_expert_tensor_parallelism:ds", "parallel.etp", "etp = 2", "", "experts are cut over the tensor-parallel ranks there: write the number of `tp`, so that `ep * etp` divides the ranks; left out it is 1 in both", but=off()),
    Row("data_parallel_size:mg,ds dp_size:ds data_parallel:ot", "parallel.dp", "dp = {}", "8", "left out it is what the ranks leave"),
    Row("data_parallel_shard_degree:tt data_parallel_replicate_degree:tt", "parallel.dp", "dp = 8", "", "it is the product of both; `zero = 3` cuts the weights over all of it"),
    Row("eplb:ot enable_eplb:ot", "adapt.placement.replicate", "adapt { placement = replicate(slots = 8) }", "", "copies live for a step, and only their homes have gradients and optimizer states; `greedy` moves homes", but=off()),
    Row("num_redundant_experts:ot ep_num_redundant_experts:ot", "adapt.placement.replicate.slots", "adapt { placement = replicate(slots = {}) }", "32", "on all ranks of `ep` together, which divides them", renames=False, but=off()),
    Row("zero_stage:ds stage:ds zero_optimization:ds", "parallel.zero", "zero = {}", "2"),
    Row("fsdp:hf,tt fully_shard:pt", "parallel.zero", "zero = 3", "", "it cuts weights, gradients and optimizer states over the data-parallel ranks", but=off()),
    Row("gradient_checkpointing:hf activation_checkpointing:ds activation_checkpoint:tt remat:ot", "parallel.recompute", "recompute = layer", "", "or `experts`, or `none`, which is the default", but=off()),
    Row("offload_optimizer:ds cpu_offload:ds optimizer_cpu_offload:mg", "parallel.offload", "offload = optimizer", "", "with devices that are CPUs it changes nothing; on others not supported yet", but=off()),
    Row("offload_param:ds", "parallel.offload", "offload = parameters", "", "with devices that are CPUs it changes nothing; on others not supported yet", but=off()),
    Row("pipeline_schedule:ot pipeline_parallel_schedule:tt", "parallel.schedule", "schedule = {}", "one_f_one_b", "for `1F1B`; `Interleaved1F1B` is `interleaved`, `LoopedBFS` `looped_bfs`, `GPipe` `gpipe`, `InterleavedZeroBubble` `zero_bubble`, `ZBVZeroBubble` `zero_bubble_v`, `DualPipeV` `dual_pipe_v`", but={"1f1b": "write `schedule = one_f_one_b`", "interleaved1f1b": "write `schedule = interleaved`", "loopedbfs": "write `schedule = looped_bfs`", "interleavedzerobubble": "write `schedule = zero_bubble`", "zbvzerobubble": "write `schedule = zero_bubble_v`", "dualpipev": "write `schedule = dual_pipe_v`"}),
    Row("num_gpus_per_node:ds gpus_per_node:ot nproc_per_node:mg", "cluster.level", 'level "node" { size = {} }', "8"),
    Row("num_nodes:mg,ds nnodes:mg", "cluster.level", 'level "rail" { size = {} }', "4", 'after `level "node" { size = 8 }`, which joins the devices of a node; with `from = dgx_h100` it is `nodes = …`'),
    Row("num_gpus:ds world_size:fm,mg n_gpu:hf n_gpus:ot gpus:pl devices:pl num_devices:pl", "", "", "", _RANKS),
    # ---- elsewhere, or not at all ----------------------------------------------------------------------
    Row("warmup_steps:hf,tt lr_warmup_iters:mg lr_decay_style:mg lr_scheduler:hf,tt lr_scheduler_type:hf num_warmup_steps:hf warmup_ratio:hf warmup:ot min_lr:mg lr_decay_iters:mg scheduler:ds lr_schedule:ot schedule_type:ot", "", "", "", _SCHEDULE),
    Row("manual_seed:pt seed:hf,mg data_seed:hf random_seed:ot", "", "", "", "leave it out: the seed is the script's, `job.build(seed={})`, with the same weights on any number of ranks"),
    Row("use_fp16:ot", "", "", "", "leave it out: moec does not train in fp16 yet, and `dtype = bf16` in `model` is the default", but=off("leave it out: `dtype = bf16` in `model` is the default")),
    Row("use_fp32:ot", "", "", "", "write `dtype = fp32` in `model`", but=off("leave it out: `dtype = bf16` in `model` is the default")),
    Row("device_memory:ot", "", "", "", 'a device of your own has it: `device "mine" { kind = cpu; memory = {}; bandwidth = 20GB/s }` outside, and `device = mine` in `cluster`'),
    Row("dense_ffn:ot", "", "", "", "a layer without experts has `ffn = swiglu(WIDTH)`"),
    Row("fused:pt foreach:pt capturable:pt", "", "", "", "leave it out: moec chooses how the step is computed, and `adamw` is fused"),
    Row("clip_grad:mg max_grad_norm:hf gradient_clipping:ds max_norm:tt grad_clip:ot clip_norm:ot clipping:ot", "", "", "", _CLIPPING),
    Row("train_iters:mg train_samples:mg max_steps:hf num_train_epochs:hf num_epochs:ot epochs:ot steps:tt total_steps:ot", "", "", "", "how long to train is in the training script"),
    Row("overlap_comm:ds transformer_impl:mg contiguous_gradients:ds reduce_bucket_size:ds allgather_bucket_size:ds", "", "", "", "leave it out: the plan has its own collectives, and kernels are moec's"),
    Row("overlap_p2p_communication:mg no_overlap_p2p_communication:mg overlap_p2p_communication_warmup_flush:mg", "", "", "", "leave it out: messages between stages always run beside computations"),
    Row("delay_wgrad_compute:mg defer_embedding_wgrad_compute:mg", "", "", "", "`schedule = zero_bubble`, `zero_bubble_v` and `dual_pipe_v` compute gradients of weights where a rank would be idle, others at once"),
    Row("moe_grouped_gemm:mg grouped_gemm:ot flash_attention:ot flash_attn:ot dispatcher:ot token_dispatcher:ot,tt use_grouped_mm:tt moe_permute_fusion:mg moe_router_fusion:mg use_flash_attn:mg attn_implementation:hf use_tutel:ds fused_kernels:ot moe_token_dispatcher_type:mg moe_shared_expert_overlap:mg overlap_grad_reduce:mg overlap_param_gather:mg tp_comm_overlap:mg", "", "", "", "the compiler chooses kernels and exchanges: leave it out"),
    Row("lm_head:hf output_layer:mg", "", "", "", "every model has its head, `head.weight`; `embedding = tokens(tied = true)` ties it to the embedding"),
    Row("attention_softmax_in_fp32:mg", "", "", "", "softmax is computed in at least fp32: leave it out"),
    Row("tokenizer_type:mg tokenizer:hf data_path:mg dataset:tt save_interval:mg checkpoint_dir:ds log_interval:mg", "", "", "", "data, logs and checkpoints are in the training script: leave it out"),
    Row("num_experts_per_token:ot experts_per_token:ot", f"{MOE}.gate.topk.k", "gate = topk({})", "2", "the weights of a token's choices are then its probabilities; where they add to 1, `gate = topk({}, normalize = true)`", renames=False),
    Row("activation:ot ffn_activation:ot act:ot act_fn:ot", "model.layers.ffn", "ffn = swiglu(14_336)", "", "the activation is the word of the call: `swiglu` for a gated `silu`, `geglu`, `gelu`, `relu`, `relu2`, `silu`"),
    Row("mlp_dim:ot ffn_size:ot ffn_dim:ot", "model.layers.ffn.swiglu.hidden", "ffn = swiglu({})", "14_336", "`gelu`, `relu`, … for another activation; of an expert it is in `experts = 8 * swiglu(14_336)`"),
)
