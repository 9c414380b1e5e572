"""Random Specs of small models on random clusters, for property tests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hypothesis import strategies as st
from support.plans import moe_spec

from moec.grammar.spec import Spec

BESIDE = [
    "",
    "shared = swiglu({0})",
    "shared = relu({0}, gated = true)",
    "residual = gelu({0}, bias = true)",
    "residual = geglu({0}); shared = relu2({1}, gated = true)",
]
"""Templates for hidden widths, which `tp` must divide."""

CAPACITIES = [
    "",
    "",
    "capacity = factor(1.0)",
    "capacity = factor(0.6, min = 2); group = sequence",
    "capacity = factor(1.25); group = batch",
    "capacity = factor(0.75); group = rank",
    "capacity = dynamic()",
    "capacity = factor(0.5, eval = 1.5); group = sequence",
    "capacity = dynamic(max = 0.8); group = sequence",
    "capacity = dynamic(max = 1.1); group = batch",
    "group = batch",
    "group = rank",
]

EXPERTS = [
    *("swiglu(8)", "gelu(12)", "swiglu(7)", "geglu(6)", "relu(9)", "relu2(8)", "silu(7)"),
    *("swiglu(8, bias = true)", "gelu(7, bias = true)"),
]
FFNS = ["gelu({2})", "geglu({0})", "relu({1})", "relu2({0})", "silu({1})", "swiglu({1}, bias = true)"]

MODELS = [
    "",
    "norm = layer_norm(eps = 1e-4)",
    "norm = layer_norm(bias = false); embedding = tokens(tied = true)",
    "embedding = tokens(tied = true, positions = learned)",
    "embedding = tokens(padding = 0)",
    "embedding = tokens(tied = true, padding = 31)",
    "embedding = tokens(separator = 5)",
    "embedding = tokens(padding = 31, separator = 2, positions = learned)",
]

NOT_IN_TEXTS = (
    *("gshard_loss", "importance_loss", "load_loss", "sequence_loss", "device_loss", "reroute", "pad", "order ="),
    *("expert_choice", "base", "batch_priority", "soft(", "smear"),
)
"""Words that count whole sequences, and so are refused where texts are packed and `group = sequence`."""

RECOMPUTED = [
    *("", "", "experts", "layer"),
    "layers 1 { recompute = layer }",
    "recompute = layer; layers 0..1 { recompute = experts }",
]


@st.composite
def mixture(draw: st.DrawFn, ranks: int, experts: int, counts: Sequence[int] = range(1, 13)) -> tuple[int, int | None]:
    """The experts of a layer, often equal to other layers', and its `ep`, None for the whole block's."""
    count = draw(st.one_of(st.just(experts), st.sampled_from(counts)))
    return count, draw(st.sampled_from([*common_divisors(ranks, count), None]))


def common_divisors(ranks: int, experts: int) -> list[int]:
    return [d for d in range(1, ranks + 1) if ranks % d == 0 and experts % d == 0]


def _allows_etp(etp: int, expert: str) -> bool:
    """Whether a mixture of such experts compiles with this `etp`."""
    kind, width = re.match(r"(\w+)(?:\((\d+))?", expert).groups()
    return kind in ("lora", "linear", "conv") or (width is not None and int(width) % etp == 0)


@st.composite
def specs(
    draw: st.DrawFn,
    max_ranks: int = 16,
    max_layers: int = 5,
    *,
    gates: Sequence[str] = (),
    experts_of: Sequence[str] = EXPERTS,
    capacities: Sequence[str] = CAPACITIES,
    models: Sequence[str] = MODELS,
    attentions: Sequence[str] = (),
    balances: Sequence[str] = (),
    counts: Sequence[int] = range(1, 13),
    ffns: Sequence[str] = FFNS,
    paths: Sequence[str] = BESIDE,
    parts: Sequence[int | None] = (None, None, 2),
    depths: Sequence[int] = (),
) -> Spec:
    """A random Spec. Each list, where given, is what its word is drawn from; in `gates`, `{k}` is a number of choices.

    `attentions` are whole calls with 4 heads, such as `mla(heads = 4, …)`, in place of `gqa`; `counts` are numbers of
    experts. `ffns` and `paths` are templates for hidden widths, as in `BESIDE`. `parts` are numbers of micro-batches.
    """
    ranks = draw(st.sampled_from([r for r in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64) if r <= max_ranks]))
    experts, expert = draw(st.sampled_from(counts)), draw(st.sampled_from(experts_of))
    etp = draw(
        st.sampled_from([degree for degree in (1, 1, 2, 4) if ranks % degree == 0 and _allows_etp(degree, expert)])
    )
    mixtures = draw(st.lists(mixture(ranks // etp, experts, counts), max_size=max_layers - 1))
    undecided = [count for count, ep in mixtures if ep is None]
    k = draw(st.integers(1, min([experts, 4, *(count for count, _ in mixtures)])))
    score = draw(st.sampled_from(["softmax", "sigmoid"]))
    order = draw(st.sampled_from(["before", "after"]))
    normalize = draw(st.sampled_from(["true", "false"]))
    tp = draw(st.sampled_from([degree for degree in (1, 1, 2, 4) if ranks % degree == 0]))
    cp = draw(st.sampled_from([degree for degree in (1, 1, 2, 4) if ranks % (tp * degree) == 0 and tp * degree <= 4]))
    sequence_parallel = draw(st.booleans())
    hidden = (6, 5, 32) if tp == 1 else (2 * tp, 4, 8)
    topk = f"topk({k}, score = {score}, order = {order}, normalize = {normalize})"
    balance = draw(st.sampled_from(["[]", "[switch_loss(0.1)]", "[z_loss(0.01)]", "[switch_loss(0.1), z_loss(0.01)]"]))
    jittered, online = (topk.replace(")", f", {more})") for more in ("jitter = 0.2", "bias = online(0.01)"))
    microbatches = draw(st.sampled_from(parts))
    usual = [topk, topk, jittered, online, "switch(jitter = 0.5)", f"hash({k}, seed = {k})"]
    gate = draw(st.sampled_from([gate.replace("{k}", str(k)) for gate in gates] or usual))
    balance = draw(st.sampled_from(balances)) if balances else "[]" if gate.startswith("hash") else balance
    model, capacity = draw(st.sampled_from(models)), draw(st.sampled_from(capacities))
    counted = any(word in f"{gate} {balance} {capacity}" for word in NOT_IN_TEXTS)
    if counted and ("sequence_loss" in balance or not capacity.endswith(("group = batch", "group = rank"))):
        model = model if "separator" not in model and "segments" not in model else ""
    dtype = draw(st.sampled_from(["fp32", "bf16"]))
    if dtype == "bf16" and not gate.startswith("hash"):
        model += draw(st.sampled_from(["", "; keep_in_fp32 = [routers]", "; router_dtype = model"]))
    return moe_spec(
        ranks=ranks,
        tp=tp if tp > 1 else None,
        cp=cp if cp > 1 else None,
        etp=etp if etp > 1 else None,
        sequence_parallel=sequence_parallel,
        zero=draw(st.integers(0, 3)),
        ep=draw(st.sampled_from([*common_divisors(ranks // etp, math.gcd(experts, *undecided)), None])),
        experts=experts,
        expert=expert,
        gate=gate,
        balance=balance,
        model=model,
        beside="; ".join([draw(st.sampled_from(paths)).format(*hidden), capacity]),
        ffn=draw(st.sampled_from(ffns)).format(*hidden),
        attention=draw(st.sampled_from(attentions)) if attentions else None,
        bias=draw(st.sampled_from(["none", "qkv", "all"])),
        qk_norm=draw(st.sampled_from(["none", "head", "projection"])),
        dim=draw(st.sampled_from([8, 16])),
        depth=draw(st.sampled_from(depths or range(2, min(4, max_layers) + 1))),
        dtype=dtype,
        batch=ranks * draw(st.integers(1, 2)) * (microbatches or 1),
        sequence=tp * cp * draw(st.integers(1, 9 // (tp * cp))),
        mixtures=tuple(mixtures),
        microbatches=microbatches,
        recompute=draw(st.sampled_from(RECOMPUTED)),
    )
