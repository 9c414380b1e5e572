"""Greedy generation on one core: tokens per second, beside transformers' `generate` with a cache and the same weights.

Both models get the same tokens, or the benchmark fails. Times are of the processor, so that other processes do not
count; a ratio is of one round, in which both take a turn. The whole call is timed, prompt and new tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import Row, median, parser, report
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import moec
from moec.runtime.job.module import PlanModule

LIMIT = 1.1


@dataclass(frozen=True)
class Shape:
    """A Mixtral of `experts` experts, of which a token takes two; heads are 16 wide or more."""

    vocab: int
    dim: int
    depth: int
    hidden: int
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8


SHAPES = {
    "the demo's widths": Shape(256, 64, 3, 128),
    "a small Mixtral": Shape(2048, 512, 4, 1024, heads=8),
}
CASES = ((1, 16, 96), (8, 16, 96), (1, 512, 32))
"""Sequences, tokens of a prompt, new tokens."""

NAMES = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "moe.gate.weight",
    "mlp.experts.gate_up_proj": "moe.experts.up.weight",
    "mlp.experts.down_proj": "moe.experts.down.weight",
    **{f"self_attn.{part}_proj.weight": f"attention.{part}.weight" for part in "qkvo"},
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for name, shape in SHAPES.items():
        theirs = transformers_model(shape)
        ours = moec_model(shape, theirs)
        for batch, prompt, new in CASES:
            seconds = in_turns(ours, theirs, prompts(shape, batch, prompt), new, given.rounds)
            what = f"{name}: {batch} × ({prompt} + {new} tokens)"
            for maker, times in zip(("moec", "transformers"), seconds, strict=True):
                rows.append(Row(f"{what}, {maker}", batch * new / median(times), "tokens/s"))
            ratios = [one / other for one, other in zip(*seconds, strict=True)]
            rows.append(Row(f"{what}, time over theirs", median(ratios), "×", LIMIT))
    report(f"generation, {given.threads} threads", rows, given.json)


def in_turns(
    ours: PlanModule, theirs: MixtralForCausalLM, tokens: Tensor, new: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each round of both, after one that is not timed and whose tokens are compared."""
    how = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    contenders: tuple[Callable[[], Tensor], Callable[[], Tensor]] = (
        lambda: ours.generate(tokens, max_new_tokens=new).tokens,
        lambda: theirs.generate(tokens, attention_mask=mask, **how)[:, tokens.shape[1] :],
    )
    one, other = (contender() for contender in contenders)
    if not torch.equal(one, other):
        raise SystemExit(f"{int((one != other).sum())} of {one.numel()} tokens differ from transformers'")
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            started = time.process_time()
            contenders[index]()
            seconds[index].append(time.process_time() - started)
    return seconds


def prompts(shape: Shape, batch: int, length: int) -> Tensor:
    return torch.randint(shape.vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def transformers_model(shape: Shape) -> MixtralForCausalLM:
    """Random weights, large enough that no two logits are nearly equal."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_local_experts=shape.experts,
        max_position_embeddings=1024,
        initializer_range=2 / shape.dim**0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return MixtralForCausalLM(config).eval()


def moec_model(shape: Shape, theirs: MixtralForCausalLM) -> PlanModule:
    """The unsharded model of a file, with their weights."""
    theta = float(theirs.config.rope_parameters["rope_theta"])
    ours = moec.reference(f"""
        model "mixtral" {{
          vocab = {shape.vocab}; dim = {shape.dim}; depth = {shape.depth}; dtype = fp32; context = 1024
          norm = rms(eps = {theirs.config.rms_norm_eps})
          layers {{
            attention = gqa(heads = {shape.heads}, kv_heads = {shape.kv_heads}, rope = rope(theta = {theta}))
            moe {{ experts = {shape.experts} * swiglu({shape.hidden}); gate = topk(2, normalize = true) }}
          }}
        }}
        cluster "here" {{ device = cpu; level "process" {{ size = 1 }} }}
        train {{ batch = 1; sequence = 16 }}
    """)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            layer = re.match(r"model\.(layers\.\d+\.)(.*)", name)
            target = ours.get_parameter(layer[1] + NAMES[layer[2]] if layer else NAMES[name])
            target.copy_(parameter.view(target.shape))
    return ours


if __name__ == "__main__":
    main()
