"""Runs a layer whose backward computes it again, by PyTorch's checkpointing; the router's choices are saved.

Recomputed, a tie between two experts could go the other way, and rows would have other places than in forward. The
counts of rows that ranks exchange follow from the choices. They are saved too: backward neither exchanges them again
nor copies them to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moec.passes.ir import Op
from moec.passes.ir import ops as _ops  # noqa: F401  (registers the ops)

KEPT = frozenset(
    {
        f"moec::{op.operator}"
        for op in Op.registry.values()
        if (op.scores or op.chooses or op.copies_to_host) and op.operator
    }
    | {"aten::max", "aten::searchsorted", "aten::topk"}
)
"""The operators whose results are saved: gates with scores, the operators that choose in gates of several ops, and the
conversions of row counts."""


class RecomputedLayer(nn.Module):
    """The graph of a layer, whose activations backward computes again."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph

    def forward(self, *inputs: Tensor) -> Any:
        """The results of the graph."""
        return recomputed(self.graph_module, *inputs)


def recomputed(run: Callable[..., Any], *inputs: Tensor) -> Any:
    """`run(*inputs)`. Autograd saves the inputs and what `KEPT` names; backward computes the rest again.

    `run` must be a function of its inputs: random numbers are (`moec.runtime.ops.jitter`), so no generator's state is
    kept. Without gradients nothing is saved.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    contexts = _compiled_contexts if torch.compiler.is_compiling() else _recording_contexts
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _RecordKept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of the operators of `KEPT`, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if _is_kept(func):
            self.results.append(_detached(results))
        return results


class _ReplayKept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the results that `_RecordKept` recorded, from the first one each time the context is entered."""

    def __init__(self, record: _RecordKept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record
        self._next: Iterator[Any] = iter(())

    def __enter__(self) -> _ReplayKept:
        self._next = iter(self._record.results)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd writes its node onto these tensors: each recomputation gets its own.
        return _detached(next(self._next)) if _is_kept(func) else func(*args, **(kwargs or {}))


def _recording_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward pass and of its recomputations.

    Unlike torch's contexts, they allow several backward passes over one forward pass (`retain_graph`).
    """
    record = _RecordKept()
    return record, _ReplayKept(record)


def _is_kept(func: Any) -> bool:
    return func._schema.name in KEPT


def _detached(results: Tensor | Sequence[Tensor]) -> Any:
    return results.detach() if isinstance(results, Tensor) else tuple(tensor.detach() for tensor in results)


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(func) else CheckpointPolicy.PREFER_RECOMPUTE


_compiled_contexts = partial(create_selective_checkpoint_contexts, _policy)
"""`torch.compile` knows only torch's own contexts."""
