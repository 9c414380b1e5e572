"""Reads published rows from a folder with `published.yaml` and `published_rows.yaml`, and what each leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from planning.models import depth_of, model_text
from planning.rows import Plan, Rows, name_of

SEQUENCES_OF_GPU = 8
"""The batch over the GPUs where a row states none: that of NVIDIA's recipes for DeepSeek-V3 and Qwen3-235B."""

RECOMPUTED = {
    "full": "layer",
    "moe": "experts",
    "selective: layernorm, moe": "experts",
    "selective: moe, layernorm": "experts",
}
"""Words of Megatron's. Where only norms and activation functions are computed again, moec's word is `none`."""

DISPATCHERS = ("DeepEP", "HybridEP")
"""Those that send a token to a node once, and copy it there."""


def read(folder: Path) -> tuple[Rows, Rows]:
    """The rows of the Folding paper, and all others."""
    published = yaml.safe_load((folder / "published.yaml").read_text())
    folding, newer = Rows(), Rows()
    for row in _folding(published["moe_parallel_folding"]):
        folding.add(row, folding_plan(row), "Folding", mfu=row["mfu"] / 100)
    for row in published["megatron_bridge"]:
        batch = SEQUENCES_OF_GPU * row["gpus"]
        _newer(newer, row | {"seq": 4096, "gbs": batch, "use": f"batch {batch}", "tflops_per_gpu": row["tflops"]})
    for row in yaml.safe_load((folder / "published_rows.yaml").read_text())["rows"]:
        _newer(newer, row | {"device": row["hardware"]})
    return folding, newer


def _folding(tables: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of table 3, and of table 4, which has one for each number of GPUs, with the layout of table 3."""
    more = {"device": "h100", "precision": "bf16", "seq": 4096}
    layouts = {}
    for row in tables["table_3"]:
        layouts[row["model"], row["method"]] = row["layout"]
        yield row | more | {"gbs": 256}
    for row in tables["table_4"]:
        layout = layouts[row["model"], row["method"]]
        for gpus, mfu in zip(row["gpus"], row["mfu"], strict=True):
            yield row | more | {"gbs": 1024, "gpus": gpus, "mfu": mfu, "layout": layout}


def folding_plan(row: Mapping[str, Any]) -> Plan:
    """Sequences one by one, experts cut like the dense parts unless said otherwise, the most stages that divide."""
    layout, method = row["layout"], row["method"]
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    text = model_text(row["model"], row["seq"])
    virtual = depth_of(text) // pp if text and pp > 1 and depth_of(text) % pp == 0 else 1
    return Plan(
        tp=tp,
        pp=pp,
        ep=layout.get("ep", 1),
        etp=layout.get("etp", tp),
        zero=3 if method.startswith("fsdp") else 1,
        virtual=virtual,
        schedule="interleaved" if virtual > 1 else "one_f_one_b",
    )


def _newer(rows: Rows, row: Mapping[str, Any]) -> None:
    """Adds a row, or why it cannot be stated."""
    source = row.get("source", "NVIDIA-NeMo/Megatron-Bridge").split(" ")[0].split(",")[0]
    layout, noted = row["layout"], f"{row.get('note', '')} {row.get('schedule', '')}"
    batch = row.get("gbs") or row.get("micro_batches", 0) * row.get("mbs", 0) * layout.get("dp", 0)
    speed = speed_of(row, batch)
    if why := _open(row, layout, batch, speed):
        rows.left_out.append((name_of(row), why))
        return
    dual, virtual = "DualPipeV" in noted, layout.get("vpp", 1)
    sharded = "fsdp" in layout or "FSDP" in noted
    plan = Plan(
        tp=layout.get("tp", 1),
        cp=layout.get("cp", 1) * layout.get("sp", 1),
        pp=layout.get("pp", 1),
        ep=layout.get("ep", 1),
        etp=layout.get("etp", 1),
        virtual=2 if dual else virtual,
        zero=3 if sharded else 1,
        microbatch=row.get("mbs", 1),
        recompute=RECOMPUTED.get(row.get("recompute", "none"), "none"),
        schedule="dual_pipe_v" if dual else "interleaved" if virtual > 1 else "one_f_one_b",
    )
    assumed = [*assumptions(row, plan)]
    ranks_only = row["precision"] != "bf16" or row.get("use", "").startswith("batch")
    rows.add(
        row | {"gbs": batch},
        plan,
        source,
        ranks_only=ranks_only,
        once_per_node=any(word.startswith(DISPATCHERS) for word in row.get("note", "").split(", ")),
        dropless="capacity" not in row.get("routing", ""),
        peak=row["peak_mem_gib"] * 2**30 if "peak_mem_gib" in row else None,
        learned=row["tflops_per_gpu_learned_router"] / row["tflops_per_gpu"]
        if "real router" in row.get("routing", "")
        else None,
        release=row.get("release", ""),
        assumed=assumed,
        **speed,
    )


def _open(row: Mapping[str, Any], layout: Mapping[str, int], batch: int, speed: Mapping[str, float]) -> str:
    """What the row leaves open, so that no file can be written or nothing compared."""
    replicas = row["gpus"] // (layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1))
    if row.get("use") == "rank only":
        return "no layout"
    if row.get("schedule", "").startswith("v-"):
        return f"moec has no schedule {row['schedule']}"
    if not batch or "seq" not in row:
        return "no batch" if not batch else "no sequence"
    if layout.get("fsdp", replicas) != replicas:
        return f"weights over {layout['fsdp']} of {replicas} replicas: zero 3 takes all"
    return "" if speed else "no speed"


def assumptions(row: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """What is stated without the source's saying so, beside what all rows have in common: zero = 1 where no FSDP is
    named, experts that are not cut, the library's vocabulary without padding, no overlap."""
    recompute = row.get("recompute", "none")
    if row["precision"] != "bf16":
        yield f"bf16, not {row['precision']}"
    if row.get("use", "").startswith("batch"):
        yield row["use"]
    if "mbs" not in row:
        yield "one sequence a micro-batch"
    if plan.recompute == "none" and recompute != "none":
        yield f"no recompute, not {recompute}"
    if plan.recompute == "experts":
        yield f"recompute = experts, not {recompute}"
    if plan.zero == 3:
        yield "zero = 3 for FSDP"
    if "sp" in row["layout"]:
        yield "cp for sequence-parallel attention"
    if row["device"] == "b300":
        yield "B200 for B300"
    if "force-balanced" not in row.get("routing", "force-balanced"):
        yield f"even load; routing: {row['routing'].split(' (')[0].split(',')[0]}"
    if "capacity" in row.get("routing", ""):
        yield "dropless for capacity 1"


def speed_of(row: Mapping[str, Any], batch: int) -> dict[str, float]:
    """Seconds of a step, or TFLOP/s by the source's own count where it states no seconds and no tokens."""
    if seconds := row.get("step_s") or row.get("step_s_derived"):
        return {"step": seconds}
    tokens = row.get("tokens_per_s") or row.get("tokens_per_s_per_gpu", 0) * row["gpus"]
    if tokens:
        return {"step": batch * row.get("seq", 0) / tokens}
    return {"tflops": row["tflops_per_gpu"]} if "tflops_per_gpu" in row else {}
