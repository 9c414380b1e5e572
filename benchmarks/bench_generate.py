"""Greedy generation on one core: tokens per second, beside transformers' `generate` with a cache and the same weights.

Both models get the same tokens, or the benchmark fails. Times are of the processor, so that other processes do not
count; a ratio is of one round, in which both take a turn. The whole call is timed, prompt and new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import Row, median, parser, report
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import moec
from moec.runtime.model.module import PlanModule

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


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for name, shape in SHAPES.items():
        theirs = transformers_model(shape)
        ours = moec_model(theirs)
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


def moec_model(theirs: MixtralForCausalLM) -> PlanModule:
    """The unsharded model of their config, with their weights."""
    ours = moec.reference(moec.from_hf(theirs.config.to_dict()))
    moec.load_hf(ours, theirs.state_dict())
    return ours


if __name__ == "__main__":
    main()
