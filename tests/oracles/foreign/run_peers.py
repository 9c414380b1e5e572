"""Runs the routers of megatron-core or of DeepSpeed themselves, on a CPU, with the options of the rows about them.

`python -m oracles.foreign.run_peers SYSTEM FILE` writes what they give to a safetensors file: `NAME weights` and
`NAME loss` of each row. It is a process of its own, because both set variables, loggers and hooks when imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from oracles.foreign import deepspeed, megatron
from oracles.foreign.routing import Routing
from oracles.foreign.row import Options, Row
from oracles.foreign.table_deepspeed import DEEPSPEED
from oracles.foreign.table_megatron import MEGATRON
from safetensors.torch import save_file
from torch import Tensor

MEGATRON_NAMES = {
    "topk": "moe_router_topk",
    "pre_softmax": "moe_router_pre_softmax",
    "num_groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "scaling_factor": "moe_router_topk_scaling_factor",
    "score_function": "moe_router_score_function",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
    "z": "moe_z_loss_coeff",
}
"""Options of `megatron.route`, and their names in `TransformerConfig`."""


def rows_of(table: Iterable[Row], *functions: Callable[..., Routing]) -> list[Row]:
    """Those that one of these functions computes with options."""
    return [row for row in table if isinstance(row.theirs, Options) and row.theirs.function in functions]


def megatron_rows() -> dict[str, Tensor]:
    """`TopKRouter.routing` of each row."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups, found = ProcessGroupCollection(), {}
    groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = dist.group.WORLD
    for row in rows_of(MEGATRON, megatron.route):
        given, experts = row.given, row.experts
        options: dict[str, Any] = row.theirs.values(given)  # type: ignore[attr-defined]  # `rows_of` chose Options
        balancing = options.get("load_balancing", "none")
        config = TransformerConfig(
            num_layers=1,
            hidden_size=experts,
            num_attention_heads=1,
            num_moe_experts=experts,
            add_bias_linear=False,
            moe_router_load_balancing_type="sinkhorn" if balancing == "sinkhorn" else "none",
            **{MEGATRON_NAMES[name]: value for name, value in options.items() if name in MEGATRON_NAMES},
        )
        router = TopKRouter(config, groups).train(row.training)
        router.layer_number, router.expert_bias = 1, options.get("expert_bias")
        # Set here, and not by the config, because the class makes counts of `global_aux_loss` on a GPU.
        router.routing_type, config.moe_aux_loss_coeff = balancing, float(balancing.endswith("aux_loss"))
        router.global_tokens_per_expert, router.ga_steps = torch.zeros(experts), torch.zeros(())
        padding = None if given.real is None else ~given.real.T.contiguous()
        sequence_first = given.logits.transpose(0, 1).contiguous().requires_grad_()
        weights, _ = router.routing(sequence_first, padding if "real" in options else None)
        found[f"{row.name} weights"] = weights.detach().view_as(sequence_first).transpose(0, 1).flatten(0, 1)
        terms = {name: float(of["values"].sum()) for name, of in moe_utils.get_moe_layer_wise_logging_tracker().items()}
        loss = sum(value * (options["z"] if name == "z_loss" else 1.0) for name, value in terms.items())
        found[f"{row.name} loss"] = torch.tensor(loss, dtype=torch.float64)
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    dist.destroy_process_group()
    return found


def deepspeed_rows() -> dict[str, Tensor]:
    """`TopKGate` of each row; `topkgating` itself where the class has no argument for an option."""
    from deepspeed.moe import sharded_moe

    here, found = torch.device("cpu"), {}
    for row in rows_of(DEEPSPEED, deepspeed.top1, deepspeed.top2, deepspeed.topk):
        options: dict[str, Any] = row.theirs.values(row.given)  # type: ignore[attr-defined]
        drawn, gumbel, used = (options.pop(name, None) for name in ("drawn", "gumbel", "used"))
        k = options.pop("k", 1 if row.theirs.function is deepspeed.top1 else 2)  # type: ignore[attr-defined]
        logits = row.given.flat.float()
        if drawn is not None:
            sharded_moe.exp_selection_uniform_map[here] = lambda shape, drawn=drawn: drawn.float()[:, None].expand(
                shape
            )
        if gumbel is not None:
            sharded_moe.gumbel_map[here] = lambda _, gumbel=gumbel: gumbel.float()
        if "drop_policy" in options:
            loss, weights, *_ = sharded_moe.topkgating(logits, k, **{"min_capacity": 4, **options})
        else:
            gate = sharded_moe.TopKGate(
                row.experts,
                row.experts,
                k,
                eval_capacity_factor=options.get("capacity_factor", 1.0),
                noisy_gate_policy="RSample" if gumbel is not None and k == 1 else None,
                use_rts=drawn is not None,
                top2_2nd_expert_sampling=gumbel is not None,
                **{"min_capacity": 4, **options},
            ).train(row.training)
            gate.wg.weight.data.copy_(torch.eye(row.experts))
            loss, weights, *_ = gate(logits, None if used is None else used.long())
        found[f"{row.name} weights"], found[f"{row.name} loss"] = weights.detach().sum(-1), loss.detach()
    return found


if __name__ == "__main__":
    system, path = sys.argv[1:]
    gathered = {"megatron-core": megatron_rows, "deepspeed": deepspeed_rows}[system]()
    save_file({name: values.double().contiguous() for name, values in gathered.items()}, path)
