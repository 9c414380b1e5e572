"""Names of DeepSpeed's `deepspeed.moe.layer.MoE`, of its JSON configuration, and of Megatron-DeepSpeed's flags for both."""

from __future__ import annotations

from moec.grammar.foreign.row import ADAMW, CAPACITY, GATE, MOE, SWITCH_LOSS, Row, off

# A row is a line: the table is read by its columns.
# fmt: off
# ruff: noqa: E501

_TOP1, _TOP2, _TOPK = (f"moe/sharded_moe.py, {name}" for name in ("top1gating", "top2gating", "topkgating"))
_GATE = "moe/sharded_moe.py, TopKGate"
_CAPACITY = "moe/sharded_moe.py, _capacity; moe/layer.py, MoE"
_RANK = "counted over a rank's tokens of a micro-batch: `group = rank` is a further line of `moe`"
_KEPT = "weights of k >= 2 choices are divided by the sum of those that were kept: `renormalize = true` of `factor(…)`"
_DROPS = "for k = 2 `factor({}, eval = 1, min = 4, renormalize = true)`, and for k > 2, where each expert keeps the choices that it weighs most, `factor({}, eval = 1, min = 4, order = weight, renormalize = true)` beside `gate = topk(K)`"
_RTS = "for k = 1 with `use_rts`, their defaults"
_NO_RTS = "no equal: without it `torch.topk` of equal numbers says who keeps a place, in no order that torch promises; nearest is the default order, `capacity = factor(1.25, eval = 1, min = 4)`"

ROWS: tuple[Row, ...] = (
    Row("k", f"{GATE}.k", "gate = topk(2, normalize = true)", "", f"k = 2 with `top2_2nd_expert_sampling`, the default, draws its second choice, which has no equal; {_KEPT}", f"{_TOP1}; {_TOP2}; {_TOPK}", "for k > 2 where nothing is dropped, and for k = 2 with `top2_2nd_expert_sampling = False`", (("for k = 1, the default", "gate = topk(1)"), ("for k > 2 with `factor(…, order = weight, renormalize = true)`", "gate = topk(6)")), renames=False),
    Row("top2_2nd_expert_sampling", "", "", "", "no equal: with it, the default, Gumbel noise is added before the second choice, in evaluation too; `gate = topk(2, normalize = true)` is DeepSpeed's with `False`", _TOP2, but=off("leave it out: `gate = topk(2, normalize = true)` takes the second best")),
    Row("noisy_gate_policy", f"{GATE}.jitter", "gate = topk(1, jitter = 0.01)", "", "`RSample` adds Gumbel noise to the logits that choose, for k = 1 alone, and weighs without it, which has no equal: `noise` is Gaussian, and weighs too", f"{_GATE}.forward; moe/sharded_moe.py, multiplicative_jitter", "for `Jitter`", renames=False, but=off() | {"rsample": "no equal: `RSample` chooses by logits with Gumbel noise and weighs without; nearest is `gate = topk(1, noise = 1.0)`, Gaussian noise that weighs too"}),
    Row("capacity_factor", f"{CAPACITY}.factor", "capacity = factor({}, eval = 1, min = 4, order = random)", "1.25", f"{_RANK}; left out it is 1.0, and `eval_capacity_factor` too; {_DROPS}", _CAPACITY, _RTS, renames=False, but=off("leave it out: without a capacity no token is dropped")),
    Row("eval_capacity_factor", f"{CAPACITY}.eval", "capacity = factor(1.25, eval = {}, min = 4)", "2.0", "left out it is 1.0, whatever `capacity_factor` is", _CAPACITY),
    Row("min_capacity", f"{CAPACITY}.min", "capacity = factor(1.25, eval = 1, min = {})", "4", "4 is their default, 1 ours", _CAPACITY),
    Row("moe_train_capacity_factor", f"{CAPACITY}.factor", "capacity = factor({}, eval = 1, min = 4, order = random)", "1.25", f"Megatron-DeepSpeed's flag for `capacity_factor`: {_RANK}; {_DROPS}", _CAPACITY, _RTS, renames=False, but=off("leave it out: without a capacity no token is dropped")),
    Row("moe_eval_capacity_factor", f"{CAPACITY}.eval", "capacity = factor(1.25, eval = {}, min = 4)", "2.0", "Megatron-DeepSpeed's flag for `eval_capacity_factor`", _CAPACITY),
    Row("moe_min_capacity", f"{CAPACITY}.min", "capacity = factor(1.25, eval = 1, min = {})", "4", "Megatron-DeepSpeed's flag for `min_capacity`", _CAPACITY),
    Row("drop_tokens", f"{MOE}.capacity", "capacity = factor(1.0, min = 4, order = random)", "", f"full experts then drop tokens, {_RANK}; {_DROPS.replace('{}', '1.0')}; `False` is `capacity = dropless`, or `dynamic()`, which also pads as DeepSpeed does", f"{_TOP1}; {_TOP2}; {_TOPK}", "for `True` with the default factors and k = 1", but=off("write `capacity = dropless()`, the default: no token is dropped")),
    Row("use_rts", f"{CAPACITY}.order", "capacity = factor(1.25, eval = 1, min = 4, order = random)", "", f"their default, for k = 1 alone; DeepSpeed draws in evaluation too, moec in training alone; for `False` {_NO_RTS}", _TOP1, but=off(_NO_RTS)),
    Row("partition_method", "parallel.stages", "stages = [0..2, 3..7]", "", "no word for a method: these are the layers of each stage, and left out the slowest stage is as fast as it can be"),
    Row("PipelineModule LayerSpec TiedLayerSpec", "", "", "", "leave it out: the layers are those of the file, which `pp = 2` in `parallel` cuts into stages; `embedding = tokens(tied = true)` ties the head"),
    Row("train_batch", "", "", "", "the training script calls `job.step(model, tokens, labels)`, which takes all micro-batches of a rank at once; then `optimizer.step()`"),
    Row("eval_batch", "", "", "", "the training script calls `model.eval()(tokens, labels).loss` under `torch.no_grad()`, with all sequences of a rank at once"),
    Row("use_residual", f"{MOE}.residual", "residual = gelu(4096)", "", "the dense path is written out: it is one more `expert`; the first of two softmaxed coefficients weighs the experts, in both", "moe/layer.py, MoE.forward", but=off()),
    Row("moe_loss_coeff", SWITCH_LOSS, "balance = [switch_loss({})]", "0.01", f"Megatron-DeepSpeed's factor on the layers' `l_aux`, {_RANK}", f"{_TOP1}; {_TOP2}; {_TOPK}", "for k = 1 and k > 2", (("for k = 2, which counts first choices alone", "balance = [gshard_loss({})]"),), renames=False, but=off()),
    Row("l_aux", f"{MOE}.balance", "balance = [switch_loss(0.01)]", "", f"`MoE` returns it without a weight, {_RANK}", f"{_TOP1}; {_TOP2}; {_TOPK}", "for k = 1 and k > 2", (("for k = 2, which counts first choices alone", "balance = [gshard_loss(0.01)]"),)),
    Row("expert_interval", MOE, "layers 1..31 step 2 { moe { … } }", "", "that is every second layer, from layer 1, for 2, Megatron-DeepSpeed's default; a later `layers` block replaces what it names", "Megatron-DeepSpeed, megatron/model/transformer.py, ParallelTransformer", but={"1": "leave it out: `moe` in `layers { … }` is in every layer"}),
    Row("weight_decay", f"{ADAMW}.weight_decay", "optimizer = adamw(weight_decay = {})", "0.01", "0 is their default, 0.1 ours; DeepSpeed decays what the script's parameter groups say", "ops/adam/fused_adam.py, FusedAdam"),
)
