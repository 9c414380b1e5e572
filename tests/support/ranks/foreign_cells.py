"""What a layer in a foreign trainer gives on a rank: made early or late, clipped and saved in every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks.foreign_trainers import CLIPS, HOSTS, Regressor, arguments, as_under_torchrun, by_moec, sharded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import moec

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def cells(host: str, folder: str) -> dict[str, Any]:
    """As one rank: what a layer made early gives, and each way to clip and to save of one made late.

    `clip`: by its name the norms, the batches, and on rank 0 the parameters after training. `save`: by its name a code,
    or the whole tensors that were read again.
    """
    with as_under_torchrun():
        train, here = HOSTS[host], Path(folder)
        found: dict[str, Any] = {"early": code_of(lambda: train(sharded, by_moec, here)), "clip": {}}
        found["group"] = dist.is_initialized()  # now the group is there, and the same lines are those of a late layer
        for name, clip in CLIPS.items():
            trained = train(sharded, clip, here)
            whole = get_model_state_dict(trained.model, options=WHOLE)
            found["clip"][name] = {"norms": trained.norms, "seen": trained.model.seen, "whole": whole}
        found["save"] = {name: save(trained.model, here) for name, save in saves(host).items()}
        return found


def code_of(act: Callable[[], object]) -> str:
    """The code of the diagnostic that `act` raises, "none" if it raises nothing. Other errors are the caller's."""
    try:
        act()
    except moec.DiagnosticError as error:
        return error.diagnostics[0].code
    return "none"


def saves(host: str) -> dict[str, Callable[[Regressor, Path], Any]]:
    """The ways to save of a host, by their names."""
    found: dict[str, Callable[[Regressor, Path], Any]] = {
        "torch.save": lambda model, folder: code_of(lambda: on_rank_0(torch.save, model.state_dict(), folder / "pt")),
        "get_model_state_dict": read_whole,
        "torch.distributed.checkpoint": read_checkpoint,
    }
    if host == "accelerate":
        found["accelerator.save_model"] = lambda model, folder: code_of(
            lambda: accelerators("save_model", model, folder)
        )
        found["accelerator.save_state"] = lambda model, folder: code_of(
            lambda: accelerators("save_state", model, folder)
        )
    if host == "Trainer":
        found["Trainer.save_model"] = lambda model, folder: code_of(lambda: trainers(model, folder))
    if host != "fully_shard":  # torch cannot pickle its classes, nor safetensors its DTensors, without a layer too
        found["torch.save of the model"] = lambda model, folder: code_of(
            lambda: on_rank_0(torch.save, model, folder / "pt")
        )
        found["safetensors"] = lambda model, folder: code_of(lambda: as_safetensors(model, folder))
    return found


def on_rank_0(save: Callable[..., object], *arguments: object) -> None:
    """As scripts under DistributedDataParallel do."""
    if dist.get_rank() == 0:
        save(*arguments)


def as_safetensors(model: nn.Module, folder: Path) -> None:
    """Every rank into its own file."""
    from safetensors.torch import save_file

    save_file(dict(model.state_dict()), folder / f"{dist.get_rank()}.safetensors")


def accelerators(call: str, model: nn.Module, folder: Path) -> None:
    """`save_model` or `save_state` of an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    given = (prepared, folder / call) if call == "save_model" else (folder / call,)
    getattr(accelerator, call)(*given)


def trainers(model: nn.Module, folder: Path) -> None:
    """`save_model` of a Trainer."""
    from transformers import Trainer

    Trainer(model=model, args=arguments(folder)).save_model(str(folder / "saved"))


def read_whole(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The file of whole tensors that rank 0 writes, loaded by other layers of all ranks, and those, whole again."""
    whole = get_model_state_dict(model, options=WHOLE)
    on_rank_0(torch.save, whole, folder / "whole.pt")
    dist.barrier()
    other = sharded()
    other.load_state_dict(torch.load(folder / "whole.pt"))
    return get_model_state_dict(other, options=WHOLE)


def read_checkpoint(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The checkpoint of all ranks, loaded by other layers of all ranks, and those, whole again."""
    dcp.save(model.state_dict(), checkpoint_id=folder / "checkpoint")
    other = sharded()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    other.load_state_dict(state)
    return get_model_state_dict(other, options=WHOLE)
