"""One model whose layers have many words of the language: a training proves all of them at once."""

from __future__ import annotations

LAYERS = [
    (
        "gate = topk(2, jitter = 0.2); balance = [switch_loss(0.01), z_loss(1e-3)]; shared = swiglu(8, gated = true)",
        "gqa(heads = 4, kv_heads = 2, rope = rope(), bias = all, qk_norm = head)",
    ),
    ("gate = gshard; balance = [gshard_loss(0.01)]; residual = gelu(8)", "gqa(heads = 4, kv_heads = 2)"),
    (
        "gate = noisy_topk(2); balance = [load_loss(0.01), importance_loss(0.01)]; group = batch",
        "gqa(heads = 4, kv_heads = 1, sinks = true, window = 3)",
    ),
    ("gate = sparsemixer(2, jitter = 0.3); balance = [switch_loss(0.01)]", "mha(heads = 4, qk_norm = projection)"),
    (
        "gate = dselect_k(2, entropy = 0.01)",
        "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 2, value_dim = 6, rope = rope())",
    ),
    ("gate = expert_choice(2)", ""),
    ("gate = soft(4)", ""),
    ("gate = smear", ""),
    ("gate = base", ""),
    (
        "gate = topk(2); balance = [switch_loss(0.01)]; group = batch; "
        "capacity = factor(1.0, order = random); overflow = reroute",
        "moa(heads = 4, kv_heads = 2, experts = 5, gate = noisy_topk(2), rope = rope(), bias = all, normalize = true, "
        "balance = [switch_loss(0.01), z_loss(0.001)])",
    ),
    ("gate = hash(2); capacity = factor(1.0)", ""),
    ("gate = topk(2, score = sigmoid, normalize = true); capacity = dynamic(max = 0.8); group = sequence", ""),
]
"""The mixture and the attention of layers 1, 2, …; layer 0 is dense."""
EXPERTS = ("swiglu(16)", "gelu(16, bias = true)", "geglu(16)", "relu2(16)") * 3


def patchwork(ranks: int = 1, degrees: str = "") -> str:
    """The text of the model on so many CPU ranks."""
    layers = "".join(
        f"  layers {number} {{ {attention and f'attention = {attention};'} moe {{ experts = 8 * {expert}; {moe} }} }}\n"
        for number, ((moe, attention), expert) in enumerate(zip(LAYERS, EXPERTS, strict=True), start=1)
    )
    return f"""\
model "patchwork" {{
  vocab = 32; dim = 16; depth = {len(LAYERS) + 1}; dtype = fp32
  norm = layer_norm(); embedding = tokens(padding = 3, positions = learned)
  layers {{ attention = mha(heads = 4); ffn = gelu(32) }}
{layers}}}
cluster "here" {{ device = cpu; level "node" {{ size = {ranks} }} }}
train {{ batch = 8; sequence = 8; optimizer = adamw(lr = 3e-3) }}
parallel {{ {degrees} }}
"""
