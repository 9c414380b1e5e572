"""The weights of a Hugging Face folder as moec's parameters and states, read in slabs of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from moec.grammar.huggingface.read import Imported
from moec.grammar.spec import Model
from moec.runtime.huggingface.fit import require_fit
from moec.runtime.huggingface.load import further_layers
from moec.runtime.huggingface.moves import pairs
from moec.runtime.huggingface.slabs import Slabs
from moec.runtime.huggingface.stored import stored_in


class FolderWeights:
    """The weights of `folder`, whose config was read as `imported`; `shapes` are those of the model's parameters.

    `model` has the names of the parameters, where it is not the config's. `left_out` names the stored tensors that the
    model does not use. Raises `DiagnosticError` MOE0905, MOE0906 and MOE0907 unless the others are exactly the model's.
    """

    def __init__(
        self, folder: Path, imported: Imported, shapes: Mapping[str, tuple[int, ...]], model: Model | None = None
    ) -> None:
        stored = stored_in(folder)
        rules = imported.family.rules(model or imported.spec.model, stored)
        found = require_fit(imported.family, rules, shapes, stored, str(folder), further_layers(imported.config))
        known = {rule.name for rule in rules}
        self.shapes = shapes
        self.left_out = tuple(name for name in stored if name not in known)
        self._stored = {rule.name: tensor for rule, tensor in found}
        self._slabs = Slabs([rule for rule, _ in found], shapes)

    def rows(self, name: str, rows: range) -> Tensor:
        """Rows of a parameter, in fp32; the whole of one without dims."""
        shape = self.shapes[name]
        slab = torch.empty((len(rows), *shape[1:]) if shape else (), dtype=torch.float32)
        for rule in self._slabs.rules_of(name, rows):
            tensor = self._stored[rule.name].view()
            for part, theirs in pairs(rule, tensor, self._slabs.parts(name, rows, slab, rule)):
                part.copy_(theirs)
        return slab
