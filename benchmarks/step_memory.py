"""The peak memory of a training step, measured on every rank; and the random plans on which it is measured."""

from __future__ import annotations

import gc
import random

import torch
from allocations import peak_bytes

import moec
from moec.codegen.plan import Plan
from moec.runtime.backends.torch import torch_memory

WARM_UP = 2
"""Steps before the measured one: the optimizer's first step makes its states."""

PLAN = """
model "measured" {{
  vocab = {vocab}; dim = {dim}; depth = {depth}; dtype = {dtype}; {model}
  layers {{
    attention = gqa(heads = 8, kv_heads = {kv_heads}, rope = rope())
    moe {{
      experts = {experts} * {expert}; gate = topk({k}, normalize = true)
      balance = [switch_loss(0.01)]; {beside}
    }}
  }}
  layers 0 {{ ffn = swiglu({ffn}) }}
}}
cluster "laptop" {{ device = cpu; level "process" {{ size = {ranks} }} }}
train {{ batch = {batch}; sequence = {sequence}; optimizer = {optimizer}; state = {state} }}
parallel {{ tp = {tp}; ep = {ep}{parallel} }}
"""


def random_text(number: int) -> str:
    """A file of a plan whose ranks take tens of MB: either the parameters or the activations prevail."""
    draw = random.Random(f"memory/{number}")
    ranks = draw.choice((1, 2, 2, 4, 4))
    tp = draw.choice([d for d in (1, 1, 2) if ranks % d == 0])
    ep = draw.choice([d for d in (1, 2, 4) if ranks % d == 0])
    dim, heavy = draw.choice((128, 192, 256)), draw.random() < 0.5
    expert = draw.choice(("swiglu({})", "swiglu({})", "gelu({}, bias = true)", "relu2({})"))
    return PLAN.format(
        vocab=draw.choice((256, 1024, 4096)),
        dim=dim,
        depth=draw.choice((3, 4, 6)),
        dtype=draw.choice(("fp32", "bf16")),
        model=draw.choice(("", "norm = layer_norm(bias = true)", "embedding = tokens(tied = true)")),
        kv_heads=draw.choice((2, 4, 8)),
        experts=draw.choice((4, 8)),
        expert=expert.format(draw.choice((128, 256, 384))),
        k=draw.choice((1, 2)),
        beside=draw.choice(("", "", "capacity = factor(1.25)", "shared = swiglu(128)", "capacity = dynamic")),
        ffn=draw.choice((256, 512)),
        ranks=ranks,
        batch=ranks * draw.choice((2, 4) if heavy else (8, 12)),
        sequence=draw.choice((64, 96)) if heavy else draw.choice((128, 192)),
        optimizer="adamw(lr = 1e-4)",
        state="fp32",
        tp=tp,
        ep=ep,
        parallel=_words(draw, ranks),
    )


def _words(draw: random.Random, ranks: int) -> str:
    """Words of `parallel` that save memory, in half of the plans."""
    words = ["", "", "; microbatches = 2", "; recompute = experts", "; recompute = layer"]
    if ranks > 1:
        words += ["; zero = 1", "; zero = 2", "; zero = 3"]
        words += ["; zero = 1; microbatches = 2", "; zero = 2; recompute = experts"]
    return draw.choice(words)


def kept_bytes() -> int:
    """Bytes of all tensors that Python sees, without blocks that wait to be used again.

    DTensors wrap tensors that are counted; tensors of `torch.compile` have no memory.
    """
    torch_memory.POOL.release()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if not torch._is_functional_tensor(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured_peak(plan: Plan) -> int:
    """The peak bytes of a training step on this process's rank, random tokens, by torch's count of allocations."""
    torch.set_num_threads(1)
    train = plan.spec.train
    assert train is not None
    others = kept_bytes()
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        shape = (2, train.batch, train.sequence)
        whole = torch.randint(plan.spec.model.vocab, shape, generator=torch.Generator().manual_seed(0))
        tokens, labels = (part.chunk(job.data_size)[job.data_rank].clone() for part in whole)

        def step() -> None:
            job.step(model, tokens, labels)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM_UP):
            step()
        before = kept_bytes() - others
        return before + peak_bytes(step)
