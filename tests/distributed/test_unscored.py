"""Router logits that are NaN or infinite end a job in one message, on every rank and before any gradient."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import moe_plan, moe_spec
from support.preloaded import environment, python
from support.ranks.gloo_pool import GlooPool

import moec
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference
from moec.runtime.weights.masters import local_part

UNSEEN = 31
"""An id that only the bad batch has."""


def steps_as_rank(options: dict[str, Any], fault: str) -> tuple[list[str], list[float], bool]:
    """This rank's error in the second of four steps, the losses of the other steps, and whether it had gradients."""
    plan = moe_plan(**options)
    errors, losses, graded = [], [], False
    with moec.launch(plan, device="cpu", timeout=20) as job:
        model = job.build(seed=1)
        tokens = torch.arange(8 * job.data_size).reshape(-1, 4) % UNSEEN
        mine = tokens.chunk(job.data_size)[job.data_rank].clone()
        gates = [local_part(p) for name, p in model.named_parameters() if name.endswith("moe.gate.weight")]
        held = [gate.clone() for gate in gates]
        embedding = local_part(model.get_parameter("embedding.weight"))
        if (job.rank + 1) % (32 // len(embedding)) == 0:  # with tp, the last of its ranks has the last ids
            embedding[-1] = torch.nan
        for step in range(4):
            batch = mine.clone()
            if step == 1 and fault == "nan" and job.data_rank == 1:
                batch[1, 2] = UNSEEN
            if fault == "inf":
                for gate, values in zip(gates, held, strict=True):
                    gate.copy_(torch.full_like(gate, torch.inf) if step == 1 else values)
            try:
                losses.append(job.step(model, batch, mine).item())
            except JobError as error:
                errors.append(str(error))
                graded = any(p.grad is not None for p in model.parameters())
            model.zero_grad()
    return errors, losses, graded


def require_errors(results: list[tuple[list[str], list[float], bool]], message: str) -> None:
    """Every rank raises the same error once; the other steps are unaffected."""
    for errors, losses, graded in results:
        assert [error.split("\nhelp: ")[0] for error in errors] == [
            f"error[MOE0708]: a router's logits, or the biases added to them, are NaN or infinite: {message}"
        ]
        assert len(losses) == 3
        assert set(losses) == {results[0][1][0]}
        assert not graded


PLANS = {
    "ep 2": {"ranks": 2, "ep": 2},
    "ep 1": {"ranks": 2, "ep": 1},
    "a capacity": {"ranks": 2, "ep": 2, "beside": "capacity = factor(0.5); group = batch"},
    "dynamic": {"ranks": 2, "ep": 2, "beside": "capacity = dynamic()"},
    "sigmoid": {"ranks": 2, "ep": 2, "gate": "topk(2, score = sigmoid, normalize = true)"},
}


OTHER_GATES = {
    "dselect_k(2)": "for 4 of 8 tokens, first token 0 of sequence 1",
    "soft": "for 4 of 8 tokens, first token 0 of sequence 1",
    "smear": "for 1 of 2 sequences, first sequence 1",
}


@pytest.mark.parametrize("gate", OTHER_GATES)
def test_nan_of_a_gate_without_route_is_said_on_both_ranks(gloo: GlooPool, gate: str) -> None:
    results = gloo.run(2, steps_as_rank, {"ranks": 2, "ep": 2, "gate": gate, "balance": "[]"}, "nan")
    where = "rank 1, step 2: the router logits of layer 1 (tiny.moe:11) are NaN or infinite"
    require_errors(results, f"{where} {OTHER_GATES[gate]}")


@pytest.mark.parametrize("plan", PLANS)
def test_nan_on_one_rank_is_said_on_all_of_them_and_they_go_on(gloo: GlooPool, plan: str) -> None:
    # One NaN token spoils its sequence: attention multiplies masked values by 0.
    where = "rank 1, step 2: the router logits of layer 1 (tiny.moe:11) are NaN or infinite"
    require_errors(
        gloo.run(2, steps_as_rank, PLANS[plan], "nan"), f"{where} for 4 of 8 tokens, first token 0 of sequence 1"
    )


def test_inf_on_every_rank_is_said_in_the_words_of_one(gloo: GlooPool) -> None:
    where = "rank 0, step 2: the router logits of layer 1 (tiny.moe:11) are NaN or infinite"
    require_errors(
        gloo.run(2, steps_as_rank, PLANS["ep 2"], "inf"), f"{where} for 8 of 8 tokens, first token 0 of sequence 0"
    )


def test_ranks_that_share_a_sequence_agree_as_well(gloo: GlooPool) -> None:
    results = gloo.run(4, steps_as_rank, {"ranks": 4, "tp": 2, "ep": 4}, "nan")
    # Each of the two tp ranks has half of every sequence.
    where = "rank 2, step 2: the router logits of layer 1 (tiny.moe:11) are NaN or infinite"
    require_errors(results, f"{where} for 2 of 4 tokens, first token 0 of sequence 1")


SCRIPT = """
import sys, torch, moec
with moec.launch(moec.load("two.plan"), device="cpu") as job:
    model = job.build(seed=1)
    tokens = torch.arange(16).reshape(4, 4)
    mine = tokens.chunk(job.data_size)[job.data_rank]
    job.step(model, mine, mine + 1)
    model.zero_grad()
    if job.rank == 1:
        model.get_parameter("layers.2.moe.gate.weight").to_local().data.fill_(float(sys.argv[1]))
    job.step(model, mine, mine + 1)
"""


@pytest.mark.parametrize(
    ("backend", "value"), [("torch", "nan"), pytest.param("triton", "inf", marks=pytest.mark.slow)]
)
def test_a_script_ends_with_one_diagnostic_on_either_backend(tmp_path: Path, backend: str, value: str) -> None:
    moe_plan(ranks=2, ep=2).save(tmp_path / "two.plan")
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    given = environment(MOEC_BACKEND=backend, TRITON_INTERPRET=str(int(backend == "triton")))
    done = subprocess.run(
        [*launcher, "train.py", value], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=given
    )
    assert done.returncode
    assert done.stderr.count("error[MOE0708]") == 1, done.stderr
    said = "rank 1, step 2: the router logits of layer 2 (tiny.moe:11) are NaN or infinite for 8 of 8 tokens"
    assert said in done.stderr
    assert "Traceback" not in done.stderr.split("error[MOE0708]")[0]
    assert "Warning" not in done.stderr


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks, and hides it
@pytest.mark.parametrize(
    "mode", ["training", "evaluation", "without labels", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_an_unsharded_model_says_it_too(mode: str) -> None:
    model = reference(moe_spec(beside="capacity = factor(0.5, eval = 1.0); group = batch"), seed=1)
    model.train(mode != "evaluation")
    if mode == "compiled":
        model.compile(fullgraph=True, backend="aot_eager")
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model.get_parameter("layers.2.moe.gate.weight").data[3] = torch.nan
    message = r"MOE0708.*: the router logits of layer 2 \(tiny.moe:11\) are NaN or infinite for 8 of 8 tokens"
    with pytest.raises(JobError, match=message):
        model(tokens, None if mode == "without labels" else tokens)
    model.get_parameter("layers.2.moe.gate.weight").data[3] = 0
    assert model(tokens).logits.isfinite().all()
