"""This rank's experts in the `state_dict` of `moec.layer`. A file must not store them as if they were all experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moec.runtime.errors import JobError


class ExpertsOfRank(DTensor):
    """A DTensor, for `torch.distributed.checkpoint` and `full_tensor()`, that `torch.save` and safetensors refuse.

    `torch.save` and safetensors write this process's part. A script that saves on rank 0 alone, as is usual under
    DistributedDataParallel, would lose the experts of all other ranks, without an error until the file is loaded.
    Copies have this class too.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensor: DTensor) -> DTensor:
        """`tensor` itself with this class: DTensor's constructors make DTensors."""
        tensor.__class__ = cls
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return cls.of(result) if type(result) is DTensor else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy of this rank's part: Tensor's own refuses, because a DTensor's `clone` makes a DTensor."""
        copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    def untyped_storage(self) -> NoReturn:
        """Refused: safetensors, transformers and accelerate call this first."""
        raise refused()

    def storage(self) -> NoReturn:
        """Refused: safetensors, transformers and accelerate call this if `untyped_storage` fails."""
        raise refused()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise refused()


def refused() -> JobError:
    """The error for a file of this rank's experts."""
    return JobError(
        "MOE0746",
        "this rank's experts would be saved as if they were all; other ranks have others",
        "on every rank `whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
        "cpu_offload=True))` of `torch.distributed.checkpoint.state_dict`, then rank 0 saves `whole`; or on every rank "
        "`torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=…)`",
    )
