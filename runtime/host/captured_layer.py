"""`layer.capture(x)`: forward and backward of `moec.layer` as CUDA graphs, for small inputs that launches hold up.

`torch.cuda.make_graphed_callables` captures; this file makes replays safe. A graph writes to the same memory each time:
results and gradients are copied out, and a forward pass runs without the graph while the last one still waits for its
backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moec.runtime.errors import JobError
from moec.runtime.refused_derivatives import beyond_backward, no_derivative

Results = tuple[Tensor, Tensor, Tensor | None]
"""y, the rows per expert, and aux_loss, which is None for a file without balance terms."""

HELP = "call the layer without `capture`"


def refused(message: str, help: str = HELP) -> JobError:
    """The error for a layer that cannot be captured, or for a misuse of a captured one."""
    return JobError("MOE0744", message, help)


class _Replay:
    """One replay of forward with a gradient. `done`: its backward has run."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


class Captured:
    """The graphs of a layer for inputs like one sample, and the memory that they write to."""

    def __init__(self, layer: nn.Module, sample: Tensor) -> None:
        """Captures the layer's `compute`, after three runs without a graph. Raises `JobError` if that fails."""
        parameters_by_name = dict(layer.named_parameters())
        self._names = list(parameters_by_name)
        self._parameter_signatures = [_signature(parameter) for parameter in parameters_by_name.values()]
        self._addresses = [parameter.data_ptr() for parameter in parameters_by_name.values()]
        self._sample_signature, self._training = _signature(sample), layer.training
        self._last: ref[_Replay] | None = None
        body = _Body(layer)

        def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
            replacements = {f"layer.{name}": p for name, p in zip(self._names, parameters, strict=True)}
            results: tuple[Tensor, ...] = functional_call(body, replacements, (x,))
            return results

        # The graph reads the parameters at their addresses: an optimizer's update needs no copy.
        static = [p.detach().requires_grad_(p.requires_grad) for p in parameters_by_name.values()]
        x = sample.detach().clone().requires_grad_(sample.requires_grad)
        try:
            with warnings.catch_warnings():
                # torch keeps the outputs of its warm-up until the capture, and warns of their gradients' stream.
                warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
                self._run: Any = torch.cuda.make_graphed_callables(run, (x, *static), allow_unused_input=True)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise refused(f"this layer cannot be captured in a CUDA graph: {reason}") from error

    def replay(self, layer: nn.Module, x: Tensor) -> Results | None:
        """The layer's results by its graphs; None for other inputs, or while a backward pass still needs the graphs."""
        parameters = dict(layer.named_parameters())
        last = self._last() if self._last is not None else None
        if not self._fits(layer, x, parameters) or (last is not None and not last.done):
            return None
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *parameters.values())):
            self._last = None  # this run overwrites the activations of the last replay
            return _as_results([result.clone() for result in self._run(x, *parameters.values())])
        inputs = [_copy_gradient(tensor) for tensor in (x, *parameters.values())]
        outputs = self._run(*inputs)
        replay = _Replay()
        self._last = ref(replay)
        return _as_results(_Outputs.apply(self, replay, *outputs))  # type: ignore[no-untyped-call]

    def _fits(self, layer: nn.Module, x: Tensor, parameters: dict[str, nn.Parameter]) -> bool:
        same_parameters = list(parameters) == self._names
        same_parameters &= [_signature(p) for p in parameters.values()] == self._parameter_signatures
        same_mode = layer.training == self._training and not torch.is_inference_mode_enabled()
        # A graphed callable copies tensors at other addresses into those of its capture: the layer's own weights.
        same_parameters = same_parameters and [p.data_ptr() for p in parameters.values()] == self._addresses
        is_capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return (
            same_parameters
            and same_mode
            and not beyond_backward()
            and _signature(x) == self._sample_signature
            and not is_capturing
            and not _has_saved_tensor_hooks()
        )

    def require_last(self, replay: _Replay) -> None:
        """Raises `JobError` if the graph has run again since: backward would read the other run's activations."""
        if self._last is None or self._last() is not replay:
            raise refused(
                "backward of a captured layer ran after another forward pass had overwritten its activations",
                "run backward once for each forward pass, before the next one (no `retain_graph`)",
            )


def _signature(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _as_results(outputs: Sequence[Tensor]) -> Results:
    y, counts, *aux_loss = outputs
    return y, counts, aux_loss[0] if aux_loss else None


class _Body(nn.Module):
    """The layer as a function of tensors: its results without the one that is None."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        results: Results = self.layer.compute(x)  # type: ignore[operator]
        return tuple(result for result in results if result is not None)


class _Outputs(torch.autograd.Function):
    """Copies of a replay's results; backward requires that the graph's activations are still those of this replay."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, replay: _Replay, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.captured, ctx.replay = captured, replay
        copies = tuple(output.clone() for output in outputs)
        ctx.mark_non_differentiable(*(copy for copy in copies if not copy.is_floating_point()))
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise no_derivative("a captured layer", "second derivative", HELP)
        ctx.captured.require_last(ctx.replay)
        ctx.replay.done = True
        return None, None, *gradients


class _CopiedGradient(torch.autograd.Function):
    """A tensor; backward copies its gradient, which the graph overwrites at the next replay.

    `.grad`, hooks and callers of `torch.autograd.grad` may keep the gradient.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def _copy_gradient(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    copied: Tensor = _CopiedGradient.apply(tensor)  # type: ignore[no-untyped-call]
    return copied


def _has_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks are active, as inside of `torch.utils.checkpoint`: a graph calls no hooks.

    Checkpoint compares the tensors that a pass saves with those of its recomputation, when the graph may be in use.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
