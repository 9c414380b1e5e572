"""Precision lost by sharding in bf16: random plans' gradient errors against float64, over the unsharded model's errors.

Random models on tp 2 × ep 2 (or with `--ranks`, more ranks), each parameter's gradient apart; `--layers`: random layers
on ep 2, whose x has a gradient as well.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser

import torch

import moec
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import STEP_BOUND, Rounding

GATES = ("topk(1)", "topk(2, normalize = true)", "topk(2, score = sigmoid)", "topk(3, order = after)", "switch")
EXPERTS = ("swiglu(8)", "gelu(12)", "geglu(8, bias = true)", "relu2(8)", "gelu(7, bias = true)")
CAPACITIES = ("", "capacity = factor(1.0)", "capacity = factor(0.75); group = rank", "capacity = dynamic()")
BESIDE = ("", "shared = swiglu(8)", "shared = relu(8, gated = true)", "residual = gelu(8, bias = true)")
BALANCES = ("[]", "[switch_loss(0.1)]", "[switch_loss(0.1), z_loss(0.01)]")
NORMS = ("rms", "layer_norm", "layer_norm(bias = false)")
EMBEDDINGS = ("tokens()", "tokens(tied = true)", "tokens(positions = learned)")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", action="store_true", help="layer files, not models")
    options = parser.parse_args()
    make, degrees = (layer, "ep 2") if options.layers else (model, "tp 2 × ep 2")
    torch.set_num_threads(1)
    found: list[Rounding] = []
    for number in range(options.count):
        text = make(random.Random(number), options.dtype, options.ranks)
        report = verify(moec.compile(text), float32=False)
        if report.rounding is None or not report.ok:
            print(f"refused, number {number}: {report.worst}\n{text}")
            continue
        found.append(report.rounding)
    ratios = sorted(ratio for each in found for name, ratio in each.gradients.items() if name != "confident logits")
    print(f"{len(found)} of {options.count} random plans in {options.dtype}, {options.ranks} ranks, {degrees}")
    print(f"error over the unsharded model's: {len(ratios)} gradients")
    for name, part in (("median", 0.5), ("95 %", 0.95), ("99 %", 0.99), ("worst", 1.0)):
        print(f"  {name:8} {ratios[min(int(part * len(ratios)), len(ratios) - 1)]:.2f}")
    if not options.layers:
        alone = max(each.gradients["confident logits"] for each in found)
        print(f"  the loss alone, on confident logits: worst {alone:.2f}")
    print(f"  geometric mean of a plan: worst {max(each.mean for each in found):.2f}, bound {found[0].mean_bound:g}")
    print(
        f"  {'y and aux_loss' if options.layers else 'logits and loss'}: worst {max(each.output for each in found):.2f}"
    )
    print(f"  bound    {found[0].bound:g}")
    print(f"a step's error over the step: worst {max(each.step for each in found):.1e}, bound {STEP_BOUND:g}")
    sys.exit(0 if len(found) == options.count else 1)


def model(draw: random.Random, dtype: str, ranks: int) -> str:
    """A random model, as a file."""
    pick = draw.choice
    return f"""\
model "drawn" {{
  vocab = {pick((32, 64))}; dim = {pick((8, 16, 32))}; depth = {pick((2, 3, 4))}; dtype = {dtype}
  norm = {pick(NORMS)}; embedding = {pick(EMBEDDINGS)}
  layers {{
    attention = {pick(("mha(heads = 4)", "gqa(heads = 4, kv_heads = 2, rope = rope(), bias = all)"))}
    moe {{
      experts = {pick((4, 8))} * {pick(EXPERTS)}; gate = {pick(GATES)}; balance = {pick(BALANCES)}
      {pick(BESIDE)}
      {pick(CAPACITIES)}
    }}
  }}
}}
cluster "here" {{ device = cpu; level "node" {{ size = {ranks} }} }}
train {{ batch = {2 * ranks}; sequence = {pick((4, 8, 16))} }}
parallel {{ tp = 2; ep = 2; sequence_parallel = {pick(("true", "false"))} }}
"""


def layer(draw: random.Random, dtype: str, ranks: int) -> str:
    """A random mixture by itself, as a file."""
    pick = draw.choice
    return f"""\
layer "drawn" {{
  dim = {pick((8, 16, 32, 64))}; dtype = {dtype}
  moe {{
    experts = {pick((4, 8))} * {pick(EXPERTS)}; gate = {pick(GATES)}; balance = {pick(BALANCES)}
    {pick(BESIDE)}
    {pick(CAPACITIES)}
  }}
}}
cluster "here" {{ device = cpu; level "node" {{ size = {ranks} }} }}
parallel {{ ep = 2 }}
"""


if __name__ == "__main__":
    main()
