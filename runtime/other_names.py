"""Names of other libraries, and what to write in their place: arguments of moec's functions, and names of a job."""

from __future__ import annotations

from collections.abc import Mapping

OF_FILE = "it is the file's: `{}`; then compile it again"
LAUNCHER = "torchrun gives it to each process: leave it out"
DTYPE = "the dtype is the file's: `model { dtype = bf16 }`; then compile it again"
BOUND = "the bounds are fixed: 1e-9 in float64; the report has every difference, and `ok`"
NO_DEVICE = "a plan is on no device: `moec.launch(plan, device='cpu')` takes one"

LAUNCH: Mapping[str, str] = {
    "backend": "`device='cuda'` takes NCCL, and `device='cpu'` gloo",
    "batch_size": OF_FILE.format("train { batch = … }"),
    "dtype": DTYPE,
    "init_method": LAUNCHER,
    "local_rank": LAUNCHER,
    "lr": OF_FILE.format("train { optimizer = adamw(lr = …) }"),
    "map_location": "`device='cpu'` or `device='cuda'`",
    "mixed_precision": DTYPE,
    "precision": DTYPE,
    "rank": LAUNCHER,
    "seed": "`job.build(seed=…)` takes it",
    "world_size": "leave it out: the plan has its number of ranks, `plan.world_size`; `moec.compile(file, "
    "world_size=…)` makes one for another number, and `torchrun --nproc-per-node` starts as many processes",
} | {name: OF_FILE.format(f"parallel {{ {name} = … }}") for name in ("dp", "ep", "tp", "zero")}
"""Arguments of `moec.launch`."""

LOAD: Mapping[str, str] = {
    "device": NO_DEVICE,
    "map_location": NO_DEVICE,
    "weights_only": "leave it out: nothing of a plan is executed; `trust_nothing=True` compiles it again, and compares",
    "world_size": "`moec.compile(file, world_size=…)` compiles for so many ranks, and `moec.load_for` chooses a plan",
}
"""Arguments of `moec.load`."""

VERIFY: Mapping[str, str] = dict.fromkeys(("atol", "eps", "rtol", "threshold", "tol", "tolerance"), BOUND)
"""Arguments of `moec.verify`."""

TOKENS = (
    "tokens and labels come by position. If `labels` are the next tokens already: `job.step(model, tokens, labels)`. "
    "If they are the ids, which Hugging Face's models shift: `job.step(model, ids[:, :-1], labels[:, 1:])`"
)
MICROBATCHES = (
    "give all of this rank's part of the batch at once: `microbatches=4` cuts it into 4; `optimizer.step()` comes "
    "once, after it"
)
LOSS = "`loss=` is a function `loss(logits, labels)` that returns a sum over tokens, a scalar"
CLIP = "`job.clip_grad_norm_(model, 1.0)` clips, between `job.step` and `optimizer.step()`"

STEP: Mapping[str, str] = {
    "accumulation_steps": MICROBATCHES,
    "attention_mask": "`padding=attention_mask == 0`, for a model with `embedding = tokens(padding = given)`",
    "criterion": LOSS,
    "gradient_accumulation_steps": MICROBATCHES,
    "grad_accum": MICROBATCHES,
    "input_ids": TOKENS,
    "labels": "labels are the next tokens, -100 where ignored. If yours are the ids, as for Hugging Face's models: "
    "`job.step(model, ids[:, :-1], labels[:, 1:])`",
    "loss_fn": LOSS,
    "loss_mask": "a label of -100 is ignored",
    "max_grad_norm": CLIP,
    "max_norm": CLIP,
    "optimizer": "call `optimizer.step()` and `optimizer.zero_grad()` after it",
    "position_ids": "positions are counted from 0; `segments=` marks packed texts, for a model that takes them",
    "targets": "they are `labels` here: the tokens that come next, int64, -100 where ignored",
}
"""Arguments of `job.step`."""

OPTIMIZER: Mapping[str, str] = {
    "lr": OF_FILE.format("train { optimizer = adamw(lr = …) }") + "; a schedule sets it in `optimizer.param_groups`",
    "betas": OF_FILE.format("train { optimizer = adamw(beta1 = …, beta2 = …) }"),
} | {name: OF_FILE.format(f"train {{ optimizer = adamw({name} = …) }}") for name in ("eps", "weight_decay")}
"""Arguments of `job.optimizer`."""

BUILD: Mapping[str, str] = {
    "dtype": f"{DTYPE}; parameters stay fp32",
    "pretrained": "`moec.load_hf(model, folder)` reads weights of Hugging Face, `job.load(path, model)` a checkpoint's",
}
"""Arguments of `job.build`."""

SAVES = "`job.checkpoint(folder, model, optimizer, every=100)` saves at steps, `job.save(path, model, optimizer)` now"
LOADS = "`job.resume(folder, model, optimizer)` loads the last checkpoint, `job.load(path, model, optimizer)` any"
IS_STEP = "`job.step(model, tokens, labels)` is a step: forward, backward and gradient sums"
BUILDS = "`model = job.build()` makes it"

DATA_RANK = "they are `job.data_rank` and `job.data_size`: this rank's part of the batch, and how many parts there are"
MAIN = "it is `job.rank == 0`"
COLLECTIVE = "`torch.distributed` has it: the job has begun its process group"
SCHEDULE = "a scheduler of `torch.optim.lr_scheduler` takes `job.optimizer(model)`"
GROUPS = "moec's graphs use the groups themselves; `plan.meshes` has their ranks, and `torch.distributed` the world's"

PER_RANK = "a rank has `plan.spec.train.batch // job.data_size` sequences in a step"

JOB: Mapping[str, str] = {
    **dict.fromkeys(("all_gather", "all_reduce", "barrier", "broadcast", "gather", "reduce"), COLLECTIVE),
    **dict.fromkeys(("data_parallel_rank", "dp_rank", "dp_size", "num_replicas"), DATA_RANK),
    **dict.fromkeys(("dp_group", "ep_group", "ep_rank", "process_group", "tp_group", "tp_rank"), GROUPS),
    **dict.fromkeys(("is_main", "is_master", "is_rank_0"), MAIN),
    **dict.fromkeys(("lr_scheduler", "scheduler"), SCHEDULE),
    **dict.fromkeys(("size", "world", "num_processes"), "it is `job.world_size`"),
    **dict.fromkeys(("batch", "batch_size", "local_batch_size"), PER_RANK),
    "backward": IS_STEP,
    "device": "`job.device_type` is 'cpu' or 'cuda': `tokens.to(job.device_type)`",
    "evaluate": "`model.eval()(tokens, labels).loss`, on every rank",
    "forward": "`model(tokens, labels)` is a forward pass, of `model = job.build()`",
    "generate": "`model.generate(tokens, max_new_tokens=…)`, of `model = job.build()`",
    "global_rank": "it is `job.rank`",
    "global_step": "it is `job.steps`",
    "is_main_process": MAIN,
    "load_checkpoint": LOADS,
    "load_state": LOADS,
    "local_rank": "torchrun sets it: `int(os.environ['LOCAL_RANK'])`; `job.build()` uses its device",
    "log": "`job.metrics(path)` writes figures, and `job.progress` shows them",
    "model": BUILDS,
    "module": BUILDS,
    "prepare": f"{BUILDS}, and `optimizer = job.optimizer(model)` its optimizer",
    "no_sync": "`with job.accumulate(model, *labels): …` adds up passes; labels are those of all of them",
    "print": "`if job.rank == 0: print(…)`",
    "save_checkpoint": SAVES,
    "save_state": SAVES,
    "seed": "`job.build(seed=…)` takes it",
    "train": IS_STEP,
    "train_batch": IS_STEP,
    "train_step": IS_STEP,
    "zero_grad": "`optimizer.zero_grad()`, of `optimizer = job.optimizer(model)`",
}
"""Names of a job."""
