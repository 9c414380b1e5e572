"""`moec.layer`: one mixture as an `nn.Module` for a plain PyTorch model, with expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moec.codegen.emit import Function, emit_function, site_of
from moec.grammar.layer_numbers import ranges
from moec.grammar.printer import set_lines
from moec.grammar.spec import Spec
from moec.passes.ir import Block, Program, Role
from moec.passes.ir.interface import scalar_blocks
from moec.passes.ir.ops import MixtureMlp
from moec.runtime import (
    ops,  # noqa: F401  (registers torch.ops.moec.*)
    unscored,
)
from moec.runtime.guards.every_guard import first_complaint, look_at
from moec.runtime.guards.guard import LayerBegins, LayerCalled, LayerRecomputed, PassEnds
from moec.runtime.host.captured_layer import Captured, Results, refused
from moec.runtime.host.layer_biases import LayerBiases
from moec.runtime.host.layer_state import INNER, PREFIX, load_local_parts, save_experts_as_dtensors
from moec.runtime.host.states_of_experts import save_states_as_dtensors
from moec.runtime.inputs.forward_checks import counts_own_tokens, same_mode, same_shape
from moec.runtime.inputs.settings import require_seed, setting_values
from moec.runtime.optimizers.replica_optimizers import refuse_replica_optimizers
from moec.runtime.optimizers.torch_clipping import count_experts
from moec.runtime.ranks.checks import Complaint, MustMatch
from moec.runtime.weights.backward_pass import in_backward
from moec.runtime.weights.home import Home, make_weights
from moec.runtime.weights.open_step import OpenStep


class HostedHome(Home, Protocol):
    """The home of a layer in a plain PyTorch model, the layer's host."""

    @property
    def hosts_divisor(self) -> int:
        """The host's divisor of gradients: its number of ranks if it averages, 1 if it sums."""
        ...

    @property
    def local_experts(self) -> Sequence[int]:
        """The indices of this rank's experts."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the layer."""
        ...

    @property
    def expert_group(self) -> str:
        """The name of the group whose ranks have different experts; empty if every rank has all experts."""
        ...

    def as_dtensor(self, name: str, part: Tensor) -> Tensor:
        """This rank's part of the parameter of this full name, as a DTensor if it is sharded."""
        ...


class MoeLayer(nn.Module):
    """A mixture of experts `[…, dim] → […, dim]`: no norm, no residual. `moec.layer` makes it.

    Parameters are fp32 and plain tensors: `gate.weight`, `experts.up.weight`, `experts.down.weight` and others that the
    file asks for. `expert_parameters()` are this rank's experts, whose gradients the host must not reduce.

    `aux_loss`, after a forward pass: the balance terms over the tokens of all ranks, a scalar, equal on every rank, or
    None if the file has none. Add it to the rank's loss. `expert_counts`: rows that this rank's tokens sent to each
    expert, int64 `[experts]`.
    """

    aux_loss: Tensor | None
    expert_counts: Tensor | None

    def __init__(self, program: Program, spec: Spec, home: HostedHome, *, float64: bool = False) -> None:
        super().__init__()
        require_seed(home.seed)
        self.dim, self._home, self.seen = spec.subject.dim, home, set[object]()
        self._words = "\n".join(set_lines(spec.layer))
        self.hosts: tuple[object, ...] | None = None
        (layer,) = program.layers
        self._function = emit_function(program, layer.body, groups=home.groups, float64=float64, ways=home.ways)
        self._scalars: dict[str, Function] = {
            name: emit_function(program, name, groups=home.groups, float64=float64) for name in scalar_blocks(program)
        }
        paths = [path.removeprefix(INNER) for path in self._function.weights]
        sites = {path.removeprefix(INNER): site for path, site in self._function.sites(layer.number).items()}
        self._weights = make_weights(self, PREFIX, paths, sites, home, OpenStep())
        # The dtype of the layer or of the reference: routers may be wider.
        self._dtype = min((spec.dtype for spec in self._weights.specs), key=lambda dtype: dtype.itemsize)
        self._weights.group_owner = home
        self.biases = LayerBiases(self, program, self._function.states, home, float64=float64)
        self._routers = [site_of(op, layer.number) for op in self._function.routers]
        self._number = torch.tensor(layer.number, device="cpu")
        self._padded = counts_own_tokens(program)
        self._one_shape = same_shape(program)
        self._waiting_op = _waiting_op(program.body(layer))
        self._captured: Captured | None = None
        self.aux_loss = self.expert_counts = None
        self.register_state_dict_post_hook(save_experts_as_dtensors)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(load_local_parts)  # type: ignore[no-untyped-call]
        self._announce_experts()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._announce_experts()  # those of a copy

    def _announce_experts(self) -> None:
        """Registers the experts with torch's clipping, optimizers and checkpoints: ranks have different experts."""
        experts = self.get_submodule("experts")
        count_experts(experts, self._home.expert_group)
        if self._home.expert_group:
            save_states_as_dtensors(experts, self._home)
            refuse_replica_optimizers(experts)

    def forward(self, x: Tensor) -> Tensor:
        """x of any floating dtype: `[batch, sequence, dim]`; `[tokens, dim]` is one sequence; more dims are batches.

        Computes in the layer's dtype, also inside of `torch.autocast`; returns x's dtype. Raises `JobError` on every
        rank for another width and for router logits that are NaN or infinite.
        """
        if in_backward() and torch.is_grad_enabled():
            lost = self.aux_loss is not None and not self.aux_loss.requires_grad
            look_at(LayerRecomputed(lost and any(self._weights.needed())))
        self.aux_loss = None  # its graph may be the last reference to the previous pass's activations
        self._home.require_running()
        replayed = self._captured.replay(self, x) if self._captured is not None else None
        y, self.expert_counts, self.aux_loss = replayed or self.compute(x)
        if self.training:
            self.biases.add(self, self.expert_counts)
        return y

    def capture(self, x: Tensor) -> None:
        """Captures forward and backward in CUDA graphs, which later calls with inputs like `x` replay.

        Worth it for small inputs (about 1,024 tokens), which launches hold up. "Like" means shape, dtype, device,
        requires_grad and training mode; other calls run as before. A new capture replaces the last. Results and
        gradients are those of a call without a graph, but router logits are not checked for NaN. Of two forward passes
        without a backward between them, the second runs without the graph; so do calls inside of
        `torch.utils.checkpoint` and with parameters that lie elsewhere (`functional_call`). The graphs keep the memory
        of one pass.

        Raises `JobError` (MOE0744) without a CUDA device, over several ranks, and for a mixture that is not computed by
        one operator, `mixture_mlp`: others may wait for the host.
        """
        self._require_capturable(x)
        self._captured = None
        self(x)  # checks x and the scores, and compiles kernels
        self._captured = Captured(self, x)

    def _require_capturable(self, x: Tensor) -> None:
        if (number := len(self._home.ranks)) > 1:
            raise refused(f"a layer over {number} ranks cannot be captured: its exchange waits for sizes")
        if self.biases.any:
            raise refused("this layer cannot be captured: a sample would count for its biases")
        if self._waiting_op is not None:
            raise refused(f"this layer cannot be captured: its {self._waiting_op} is not `mixture_mlp`")
        if not isinstance(x, Tensor):
            raise refused(
                f"`capture` wants a tensor as a sample, not {type(x).__name__}", "give it an input of the layer"
            )
        if x.device.type != "cuda":
            raise refused(f"CUDA graphs are captured on a CUDA device, and x is on {x.device}")

    def compute(self, x: Tensor) -> Results:
        """`forward` without a CUDA graph: y, the rows per expert, and aux_loss."""
        reads_values = self._require_input(x)
        with torch.autocast(x.device.type, enabled=False), unscored.noting() as unscored_masks:
            sequences = _as_sequences(x).to(self._dtype)
            results = self._run(sequences)
            ended = PassEnds(unscored_masks, self._routers, reads_values=reads_values, site="end of a layer")
            look_at(ended, self._home.checks)
            aux_loss = self._aux_loss(results["balance"], sequences) if "balance" in results else None
        y = results["residual"]
        # `fully_shard` warns if a module returns a view.
        return (y if y.shape == x.shape else y.reshape(x.shape)).to(x.dtype), results["counts"][0], aux_loss

    def end_step(self) -> bool:
        """Moves the biases of `online` by the rows that experts received since the last step; see `moec.end_step`.

        Returns whether any rank had a forward pass in training since then. A collective of the layer's ranks.
        """
        if not self.biases.any:
            return False
        loads = self.biases.loads
        (passes,) = self._home.checks.require("end of a layer's step", None, counts=[int(loads is not None)])
        if passes:
            self.biases.move(self, self._no_rows() if loads is None else loads[None])
        return bool(passes)

    def _no_rows(self) -> Tensor:
        (bias,) = self.biases.by_name(self).values()
        return torch.zeros((1, *bias.shape), dtype=torch.int64, device=bias.device)

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's experts, which the host must not reduce, shard or broadcast."""
        return self.get_submodule("experts").parameters()

    @property
    def local_experts(self) -> Sequence[int]:
        """The indices of this rank's experts among all."""
        return self._home.local_experts

    def extra_repr(self) -> str:
        if len(self._home.ranks) == 1:
            return self._words
        return f"{self._words}\nexperts {', '.join(ranges(self.local_experts))} are on this rank"

    def _run(self, x: Tensor) -> dict[Role, Tensor]:
        """y, the rows per expert, and the balance term if there is one, by their roles."""
        settings = setting_values(self._function.settings, {}, training=self.training)
        states = self.biases.by_name(self).values()
        results: Sequence[Tensor] = self._function.module(x, self._number, *settings, *states, *self._weights())
        return {output.role: result for output, result in zip(self._function.results, results, strict=True)}

    def _aux_loss(self, balance: Tensor, x: Tensor) -> Tensor:
        count = self._scalars["num_tokens"].module(x)
        aux_loss: Tensor = self._scalars["aux_loss"].module(balance, count)
        return _scale_gradient(aux_loss, float(self._home.hosts_divisor))

    def _require_input(self, x: Tensor) -> bool:
        """Raises `JobError` for an invalid x; returns whether this pass checks tensors' values."""
        checks = self._home.checks
        kind = ("forward", self.training)
        look_at(LayerCalled(self, self.get_submodule("experts"), self._home.ranks))
        reads_values = checks.reads_values(self.seen, kind, x.device)
        complaint = None
        if x.dim() == 0 or x.shape[-1] != self.dim or not x.is_floating_point():
            words = f"x is {x.dtype} {list(x.shape)}, and must be floating, […, {self.dim}]"
            complaint = Complaint("MOE0702", words)
        complaint = complaint or first_complaint(
            LayerBegins(
                lambda: self.biases.by_name(self), stepped=self.training and self.biases.stepped,
                rounded=lambda: self._weights.rounded(self._dtype), reads_values=reads_values,
            )
        )  # fmt: skip
        if reads_values or self._padded:
            # A capacity is computed from one rank's tokens: every rank must have as many.
            shape = (0, 0) if complaint or not self._padded else tuple(_as_sequences(x).shape[:2])
            modes = same_mode(self.training, self._weights.needed())
            checks.require("start of a layer", complaint, MustMatch("MOE0702", self._one_shape, shape), *modes)
        elif complaint:
            raise complaint.error()
        return reads_values

    def __getstate__(self) -> dict[str, Any]:
        """For copies: drops a forward pass's results, part of its graph, and weak references, which do not pickle."""
        return self.__dict__ | {"aux_loss": None, "expert_counts": None, "hosts": None, "_captured": None}


def _waiting_op(block: Block) -> str | None:
    """The first op of rows that does not keep them on the rank in one operator, if any: it may wait for the host."""
    return next((op.mnemonic for op in block.ops if op.moves and not isinstance(op, MixtureMlp)), None)


def _as_sequences(x: Tensor) -> Tensor:
    """x as `[batch, sequence, dim]`."""
    if x.dim() < 3:
        return x.reshape(1, -1 if x.dim() == 1 else x.shape[0], x.shape[-1])
    return x.flatten(0, -3)


class _ScaledGradient(torch.autograd.Function):
    """x; backward multiplies its gradient by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by `factor`."""
    if factor == 1:
        return x
    scaled: Tensor = _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled
