"""Masters, weights and gradients of every rank, with the conversions between their declared layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moec.codegen.plan import Plan
from moec.passes.ir import Layout, Parameter, local_slices
from moec.passes.ir.interface import forwards
from moec.passes.place.between_steps import conversions_between
from moec.passes.place.schedule import Unit, units_of
from moec.runtime.verify.cluster.shuffles import forward_shuffle


class VirtualWeights:
    """The parameters of all ranks of `plan`. A rank's masters are its parts of `parameters` (full name → unsharded
    tensor).

    Weights are gathered from masters, and gradients end in their layout. With `slots` of a layer the weights of guests
    stand behind those of a rank's own experts. Ranks that sum a gradient over the same list
    of the first group of `sum_over`, and hold the same part of the weight, share a leaf: autograd adds their gradients.
    Each rank has its own leaf in bf16, where autograd would round each sum, and in a wrong plan in which a rank is in
    several lists. A gradient is a list with one tensor for each leaf.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, Tensor], slots: Mapping[int, Tensor]) -> None:
        self._plan = plan
        self._slots = {
            f"{layer.prefix}{p.name}": slots[layer.number][0]
            for layer in plan.program.layers
            if layer.number in slots
            for p in plan.program.body(layer).parameters
            if p.is_of_experts
        }
        """The slots of experts, by the full names of parameters."""
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        self.masters = {name: self._masters(name, parameter) for name, parameter in self._parameters.items()}
        self._leaf_of_rank: dict[str, list[int]] = {}
        self._weights: dict[tuple[str, int, int], list[Tensor]] = {}
        """Each rank's weight by its name, its stage, and the micro-batch if every use gathers it again."""
        self.stage, self.microbatch = 0, 0
        """The stage and the micro-batch that use the weights now."""
        self.units = [units_of(plan.program, stage) for stage in range(len(forwards(plan.program)))]
        """The units of each stage, in the order of their first use."""
        self._groups = plan.groups_in_stage
        self.unit_of = {name: unit for units in self.units for unit in units for name, _ in named_parameters(unit)}
        """The unit of each parameter's full name."""

    def _masters(self, name: str, parameter: Tensor) -> list[Tensor]:
        """Each rank's part of a parameter's master, in the memory of `parameter`; equal parts are one tensor."""
        data, parts = self._plan.parameters[name], dict[object, Tensor]()
        masters = []
        for rank in range(self._plan.stage_size):
            index = data.cells(self._plan.meshes[data.mesh], rank)
            key = tuple((cut.start, cut.stop) for cut in index)
            if key not in parts:
                parts[key] = parameter[index]
            masters.append(parts[key])
        return masters

    # ---- weights -----------------------------------------------------------------------------------

    def weight(self, name: str) -> list[Tensor]:
        """Each rank's weight. Raises `LookupError` for one that was not gathered."""
        key = self._key(name)
        if key not in self._weights:
            if self._plan.parameters[name].gathered != "never":
                raise LookupError("the weight is used, and was not gathered")
            self._weights[key] = self.leaves(name)
        return self._weights[key]

    def _key(self, name: str) -> tuple[str, int, int]:
        return name, self.stage, self.microbatch if self._plan.parameters[name].gathered == "per use" else 0

    def has(self, unit: Unit) -> bool:
        """Whether all weights of a unit that must be gathered are gathered."""
        return all(p.gathered == "never" or self._key(name) in self._weights for name, p in named_parameters(unit))

    def gather(self, unit: Unit) -> None:
        """Gathers the weights of a unit of which ranks have parts."""
        for name, p in named_parameters(unit):
            if p.gathered != "never" and self._key(name) not in self._weights:
                self._weights[self._key(name)] = self.leaves(name)

    def drop_used(self, unit: Unit) -> None:
        """Drops the weights that the next use of a unit gathers again."""
        for name, p in named_parameters(unit):
            if p.gathered == "per use":
                self._weights.pop(self._key(name), None)

    def drop_all(self) -> None:
        """Drops all weights at the end of a step."""
        self._weights.clear()

    def leaves(self, name: str) -> list[Tensor]:
        """New leaves with each rank's weight: parts of `parameters` in their memory, or gathered from the masters."""
        data, parameter = self._plan.parameters[name], self._parameters[name]
        mesh, lists = self._plan.meshes[data.mesh], self._groups[data.sum_over[0]] if data.sum_over else ()
        listed = [rank for ranks in lists for rank in ranks]
        shares = torch.finfo(parameter.dtype).bits >= 32 and len(set(listed)) == len(listed)
        owner = {rank: ranks[0] for ranks in lists for rank in ranks} if shares else {}
        gathered = self._converted(name, self.masters[name], data.master, data.layout)
        leaves: dict[object, tuple[int, Tensor]] = {}
        leaf_of_rank = []
        cells = [local_slices(data.shape, data.layout, mesh, rank) for rank in range(self._plan.stage_size)]
        if data.master == data.layout:
            gathered = [parameter[index] for index in cells]
        if name in self._slots:
            gathered = self._in_groups(name, gathered, hosted)
        for rank, (index, weight) in enumerate(zip(cells, gathered, strict=True)):
            key = (owner.get(rank, rank), *((cut.start, cut.stop) for cut in index))
            if key not in leaves:
                leaves[key] = len(leaves), weight.detach().requires_grad_(not data.frozen)
            leaf_of_rank.append(leaves[key])
        self._leaf_of_rank[name] = [number for number, _ in leaf_of_rank]
        return [leaf for _, leaf in leaf_of_rank]

    # ---- gradients ---------------------------------------------------------------------------------

    def gradient_of_pass(self, name: str) -> list[Tensor]:
        """Each leaf's gradient of the last backward pass, in at least fp32, as a job widens it before it sums.

        Zeros for a parameter that a wrong plan does not use.
        """
        weights = self._weights.get(self._key(name)) or self.leaves(name)
        gradients = []
        for leaf in dict(zip(self._leaf_of_rank[name], weights, strict=True)).values():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            gradients.append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
            leaf.grad = None
        return gradients

    def summed(self, name: str, leaf_gradients: Sequence[Tensor]) -> list[Tensor]:
        """A gradient after the sums over the plan's groups: each rank's part, in the master's layout."""
        data, leaf_of = self._plan.parameters[name], self._leaf_of_rank[name]
        gradients, shared = [leaf_gradients[leaf] for leaf in leaf_of], len(leaf_gradients) < len(leaf_of)
        if name in self._slots:
            gradients = self._in_groups(name, gradients, returned)
        for number, group in enumerate(data.sum_over):
            for ranks in self._groups[group]:
                terms = [gradients[rank] for rank in ranks]
                if shared and number == 0:  # a leaf of several ranks has the sum of their gradients already
                    terms = list({leaf_of[rank]: gradients[rank] for rank in ranks}.values())
                total = torch.stack(terms).sum(0)
                for rank in ranks:
                    gradients[rank] = total
        return self._converted(name, gradients, data.layout, data.master)

    def _in_groups(
        self, name: str, parts: Sequence[Tensor], convert: Callable[[Sequence[Tensor], Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """Every rank's part of a parameter of experts, converted by the ranks of each group of `ep`."""
        results = list(parts)
        for ranks in self._plan.meshes[self._plan.parameters[name].mesh].groups("ep"):
            for rank, part in zip(ranks, convert([parts[r] for r in ranks], self._slots[name]), strict=True):
                results[rank] = part
        return results

    def _converted(self, name: str, parts: Sequence[Tensor], source: Layout, target: Layout) -> list[Tensor]:
        """Every rank's part of a parameter or a gradient, converted from layout `source` to `target`.

        A sum and the slice after it have the result of a reduce_scatter.
        """
        parts, mesh = list(parts), self._plan.meshes[self._plan.parameters[name].mesh]
        for conversion in conversions_between(source, target):
            shuffle = forward_shuffle(conversion)
            for ranks in mesh.groups(conversion.axis):
                for rank, part in zip(ranks, shuffle(conversion, [parts[rank] for rank in ranks]), strict=True):
                    parts[rank] = part
        return parts


def hosted(parts: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    """The weights of all ranks of a group with those of guests behind their own. Nothing reads an empty slot: NaN."""
    experts = torch.cat(list(parts))
    chosen = [experts[row.clamp(min=0)].clone() for row in slots]
    for weights, row in zip(chosen, slots, strict=True):
        weights[row < 0] = torch.nan
    return chosen


def returned(gradients: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    """The gradients of all ranks' own experts, to which those of their guests are added."""
    total = gradients[0].new_zeros((int(slots.max()) + 1, *gradients[0].shape[1:]))
    for gradient, row in zip(gradients, slots, strict=True):
        total.index_add_(0, row[row >= 0], gradient[row >= 0])
    return list(total.chunk(len(gradients)))


def named_parameters(unit: Unit) -> Iterator[tuple[str, Parameter]]:
    """The parameters of a unit with their full names."""
    prefix = f"{unit.name}." if unit.is_layer else ""
    return ((f"{prefix}{parameter.name}", parameter) for parameter in unit.parameters)
