"""Values of other systems with moec's equal or nearest words."""

from __future__ import annotations

from itertools import product

from moec.grammar.spec.optimizers import OPTIMIZERS as OWN

# fmt: off
# ruff: noqa: E501

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
    **dict.fromkeys(("silu_glu", "swish_glu", "silu_gated"), "swiglu"),
    **dict.fromkeys(("swish",), "silu"),
    **dict.fromkeys(("squared_relu", "relu_squared", "relu^2"), "relu2"),
    "adam_w": "adamw",
    **{f"{kind}{word}{bits}": word for word in OWN for kind, bits in product(("", "fused", "fused_", "paged", "paged_", "deepspeedcpu"), ("", "32bit", "_32bit")) if kind + bits},
    **dict.fromkeys(("top_k", "topk_router"), "topk"),
    "noisy_top_k": "noisy_topk",
    **dict.fromkeys(("router_z_loss",), "z_loss"),
    **dict.fromkeys(("dropless_moe", "no_drop", "nodrop", "unlimited"), "dropless"),
    **dict.fromkeys(("full", "block", "blocks"), "layer"),
    **dict.fromkeys(("1f1b",), "one_f_one_b"),
    "zb1p": "zero_bubble",
    "zbv": "zero_bubble_v",
    "dualpipev": "dual_pipe_v",
    **dict.fromkeys(("rotary",), "rope"),
}
"""Values of other systems, in lower case unless they are Python's, and the word here that means the same."""

_ADAM = "`adamw(weight_decay = 0)` is Adam without weight decay; with it, Adam and AdamW are different optimizers"
_GELU = "`gelu` here is the exact one, of the error function; moec does not have its approximation by tanh, nor by a sigmoid"
_ACTIVATION = "moec has `gelu`, `relu`, `relu2` and `silu`, and gated ones: `swiglu`, `geglu`"
OPTIMIZERS = (
    f"moec's own are {', '.join(f'`{word}`' for word in OWN)}; a script may take element-wise ones of `torch.optim` instead "
    "(docs/optimizers.md)"
)
HUGGING_FACE_AUX_LOSS = "Hugging Face's is `switch_loss(WEIGHT, over = model)` with WEIGHT its coefficient times k, and `group = batch` (docs/from)"
_AUX_LOSS = f"the term is `switch_loss`; for k = 2 DeepSpeed's and Tutel's is `gshard_loss`, which counts first choices alone; {HUGGING_FACE_AUX_LOSS}"
_8_BIT = "no optimizer here keeps states in 8 bits: `state = bf16` in `train` keeps them in 16"
_FP8 = "moec does not train in 8 or 4 bits yet: write `bf16`, or `fp32`"

NEAR: dict[str, str] = {
    **dict.fromkeys(("adam", "fused_adam", "fusedadam"), _ADAM),
    **dict.fromkeys(("gelu_new", "gelu_tanh", "gelu_pytorch_tanh", "gelu_fast", "openai_gelu", "quick_gelu"), _GELU),
    **dict.fromkeys(("quick_geglu",), "no equal; nearest is `swiglu(WIDTH, alpha = 1.702)`, which adds 1 to the other factor"),
    **{f"{kind}{word}{bits}": _8_BIT for word in OWN for kind, bits in product(("", "paged", "paged_"), ("8bit", "_8bit"))},
    **dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "e4m3", "mxfp8", "fp4", "nvfp4"), _FP8),
    "seq_aux_loss": "Megatron's is `sequence_loss`, the same value: its fractions are of the best scores alone",
    "sequence_aux_loss": "DeepSeek's and Megatron's are `sequence_loss`",
    **dict.fromkeys(("elu", "selu", "celu", "mish", "softplus", "tanh", "leaky_relu", "prelu", "hardswish"), _ACTIVATION),
    **dict.fromkeys(("glu", "reglu", "bilinear"), _ACTIVATION),
    **dict.fromkeys(("adamax", "nadam", "radam", "adagrad", "rmsprop", "lamb", "lars", "sophia", "shampoo", "soap"), OPTIMIZERS),
    **dict.fromkeys(("flash_attention", "flash_attn", "flash", "sdpa"), "the compiler chooses the kernel: write `gqa(heads = 32, kv_heads = 8, rope = rope())`"),
    "tf32": "TF32 is how a GPU multiplies fp32: write `fp32`, and set `torch.backends.cuda.matmul.allow_tf32` in the script",
    **dict.fromkeys(("mqa", "multi_query_attention", "multi_query"), "multi-query attention is `gqa(heads = 32, kv_heads = 1)`"),
    **dict.fromkeys(("load_balancing_loss", "aux_loss", "load_balance_loss"), _AUX_LOSS),
    **dict.fromkeys(("modulelist", "sequential"), "equal experts are a product: write `8 * swiglu(WIDTH)`"),
    "multi_latent_attention": "Megatron's turns neighbours always: `mla(…, rope = rope(interleaved = true))`",
    "capacity_factor": "write `factor(1.25)`; what a system's number means: `moec explain capacity_factor`",
    "cv_loss": "the squared coefficient of variation of the experts' importance is `importance_loss`; its variance divides by the number of experts, elsewhere often by one less",
    "global_aux_loss": "Megatron's is `switch_loss` with `group = batch`, where a step has one micro-batch; with expert biases or groups `fractions = scores` too",
    "sinkhorn": "no gate here balances by Sinkhorn's iteration: `topk(1)` with `balance = [switch_loss(0.01)]` is nearest",
    "quantile_balancing": "no gate here balances by quantiles: `topk(K, score = sigmoid, bias = online(1e-3))` is nearest",
    "sqrtsoftplus": "no equal: `score` is `softmax` or `sigmoid`",
    "selective": "Megatron's `selective` computes the attention's scores again, which are never saved here: leave it out; for the experts write `experts`",
    "probs": "each expert of Megatron's keeps the choices that it weighs most: `weight`",
    "position": "no equal: in Megatron `torch.topk` of equal numbers says who keeps a place, in no order that torch promises; nearest is `sequence`",
    **dict.fromkeys(("naive", "naivegate"), "FastMoE's `NaiveGate` is `topk(K, order = after, bias = learned)`"),
    **dict.fromkeys(("switchgate",), "no equal; nearest is `topk(1, bias = learned)`: FastMoE adds uniform noise to the logits"),
    **dict.fromkeys(("gshardgate",), "no equal; nearest is `topk(2, order = after, bias = learned)`: FastMoE drops second choices at random, in evaluation too"),
}
"""Values of other systems that have no equal here, and what is nearest. Nothing is replaced by itself."""

OURS = frozenset(("bf16", "capacity", "gate", "k", "lr", "seed", "sequence_parallel", "swiglu", "weight_decay"))
"""Names of the table that are words of this language too; messages do not treat them as another system's."""

IN_BLOCKS: dict[tuple[str, str], str] = {
    **dict.fromkeys((("train", "seed"), ("model", "seed")), "manual_seed"),
    **dict.fromkeys((("train", "bf16"), ("model", "bf16")), "amp"),
    **dict.fromkeys((("train", "fp16"), ("model", "fp16")), "use_fp16"),
    **dict.fromkeys((("train", "fp32"), ("model", "fp32")), "use_fp32"),
    **dict.fromkeys((("train", "clip"), *((word, "clip") for word, kind in OWN.items() if not hasattr(kind, "clip"))), "clipping"),
    **dict.fromkeys((("train", "schedule"), ("train", "cosine"), ("train", "linear")), "lr_schedule"),
    **dict.fromkeys((("train", "accumulation"), ("train", "accumulate")), "gradient_accumulation_steps"),
    ("cluster", "memory"): "device_memory",
    ("layers", "dense"): "dense_ffn",
    ("model", "dense"): "dense_layers",
}
"""Words of this language that count as another system's name, given here, in a block that does not have them."""
