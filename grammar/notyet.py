"""Words of the language that no backend implements yet, by the place where they would stand.

A place is `block.name` for values of a name, or a block or call for the names in it. A word moves out of here when
it enters the schema; nothing else needs to know.
"""

from __future__ import annotations

_ATTENTION = frozenset({"qk_norm", "bias", "window", "sinks", "clip", "causal"})
_FEED_FORWARD = frozenset({"geglu", "relu", "relu2", "linear", "lora", "conv", "mixture"})

NOT_YET: dict[str, frozenset[str]] = {
    "file": frozenset({"adapt", "layer"}),
    "model.norm": frozenset({"layer_norm"}),
    "tokens": frozenset({"positions", "multiplier"}),
    "rope": frozenset({"scaling"}),
    "layers.attention": frozenset({"mla", "moa"}),
    "gqa": _ATTENTION,
    "mha": _ATTENTION,
    "layers.ffn": _FEED_FORWARD,
    "experts.body": _FEED_FORWARD,
    "swiglu": frozenset({"clamp", "alpha", "gated"}),
    "gelu": frozenset({"gated"}),
    "moe": frozenset({"shared", "residual", "overflow"}),
    "moe.gate": frozenset(
        {
            "attention_router",
            "base",
            "batch_priority",
            "dense",
            "dselect_k",
            "expert_choice",
            "gshard",
            "hash",
            "noisy_topk",
            "smear",
            "soft",
            "sparsemixer",
            "switch",
            "topology",
        }
    ),
    "topk": frozenset({"scale", "bias", "groups", "keep_groups", "group_score", "jitter", "noise"}),
    "moe.group": frozenset({"batch", "rank"}),
    "moe.capacity": frozenset({"factor", "dynamic"}),
    "moe.balance": frozenset({"gshard_loss", "importance_loss", "load_loss", "sequence_loss", "device_loss"}),
    "train.routing": frozenset({"trace"}),
    "parallel": frozenset(
        {
            "tp",
            "pp",
            "etp",
            "cp",
            "zero",
            "offload",
            "recompute",
            "microbatches",
            "schedule",
            "sequence_parallel",
            "layers",
        }
    ),
    "parallel.dp": frozenset({"auto"}),
    "parallel.ep": frozenset({"auto"}),
}

LISTS_NOT_YET = frozenset({"moe.experts", "parallel.dp", "parallel.ep"})
"""Places that will take a list as well."""
