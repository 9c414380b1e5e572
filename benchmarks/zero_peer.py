"""The model of bench_zero.py in DeepSpeed: its MoE layers and its ZeRO around the plain model, on this job's ranks.

The weights are those of moec's reference, so that both find the same losses. DeepSpeed is a package of its own, which
moec does not ask for: on CPU it is installed with `DS_BUILD_OPS=0` and runs with `DS_ACCELERATOR=cpu`.
"""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

import torch
from plain_moe import PlainModel, PlainMoe
from plain_weights import plain_state_dict
from torch import Tensor, nn

import moec
from moec.grammar.spec import Spec
from moec.grammar.spec.optimizers import AdamW
from moec.passes.degrees.degrees import choose_degrees

MAX_NORM = 1.0


def missing() -> str | None:
    """The reason why DeepSpeed cannot run, or None."""
    try:
        importlib.import_module("deepspeed")
    except (ImportError, OSError, RuntimeError) as error:  # it looks for compilers and accelerators
        return f"deepspeed: {type(error).__name__}: {error}"
    return None


class Peer:
    """DeepSpeed's engine at one stage of ZeRO: every rank of `job` has one."""

    def __init__(self, job: moec.Job, zero: int, microbatches: int) -> None:
        deepspeed = importlib.import_module("deepspeed")
        groups = importlib.import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
        logging.disable(logging.WARNING)
        deepspeed.init_distributed("gloo")
        spec, self.microbatches = job.plan.spec, microbatches
        assert spec.train is not None
        model, (experts,) = _plain(spec), choose_degrees(spec).experts
        for layer in model.layers:
            layer.moe = DeepSpeedMoe(layer.moe, experts.ep, job.rank % experts.ep)
        parameters = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
        adam = spec.train.optimizer
        assert isinstance(adam, AdamW)
        optimizer = torch.optim.AdamW(
            groups(parameters), lr=adam.lr, betas=(adam.beta1, adam.beta2), eps=adam.eps, fused=True,
            weight_decay=adam.weight_decay,
        )  # fmt: skip
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": spec.train.batch // job.data_size // microbatches,
                "gradient_accumulation_steps": microbatches,
                "gradient_clipping": MAX_NORM,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": zero},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One training step, timed; gives the loss."""
        started = time.perf_counter()
        losses = []
        for part, of_part in zip(tokens.chunk(self.microbatches), labels.chunk(self.microbatches), strict=True):
            _, loss = self.engine(part, of_part)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(float(loss.detach()))
        self.seconds.append(time.perf_counter() - started)
        return sum(losses) / len(losses)


class DeepSpeedMoe(nn.Module):
    """DeepSpeed's layer with the weights of a plain one; every token is kept."""

    def __init__(self, plain: PlainMoe, degree: int, place: int) -> None:
        super().__init__()
        (term,) = plain.terms
        self.weight = term.weight
        layer: Any = importlib.import_module("deepspeed.moe.layer").MoE
        self.moe = layer(
            plain.gate.in_features, plain.experts[0], plain.num_experts, degree, k=plain.topk.k, drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )  # fmt: skip
        local = plain.num_experts // degree
        mine = plain.experts[place * local : (place + 1) * local]
        for copy, expert in zip(self.moe.deepspeed_moe.experts.deepspeed_experts, mine, strict=True):
            copy.load_state_dict(expert.state_dict())
        self.moe.deepspeed_moe.gate.wg.load_state_dict(plain.gate.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, sequence, dim]: the mixed tokens, and the weighted balance term."""
        mixed, balance, _ = self.moe(x)
        return mixed, self.weight * balance


def _plain(spec: Spec) -> PlainModel:
    model = PlainModel(spec)
    model.load_state_dict(plain_state_dict(dict(moec.reference(spec, seed=1).named_parameters())))
    return model
