"""The weights of a Hugging Face folder as moec's parameters and states, read in blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from moec.grammar.huggingface.read import Imported
from moec.grammar.spec import Model
from moec.runtime.huggingface.fit import require_fit
from moec.runtime.huggingface.load import num_further_layers
from moec.runtime.huggingface.moves import pairs
from moec.runtime.huggingface.row_blocks import RulesOfRows
from moec.runtime.huggingface.source_tensors import source_tensors


class FolderWeights:
    """The weights of `folder`, whose config was read as `imported`; `shapes` are those of the model's parameters.

    `model` names the parameters; by default it is the config's model. `left_out` names the stored tensors that the
    model does not use. Raises `DiagnosticError` MOE0905, MOE0906 and MOE0907 unless the others are exactly the model's.
    """

    def __init__(
        self, folder: Path, imported: Imported, shapes: Mapping[str, tuple[int, ...]], model: Model | None = None
    ) -> None:
        stored = source_tensors(folder)
        rules = imported.family.rules(model or imported.spec.model, stored)
        fitting = require_fit(imported.family, rules, shapes, stored, str(folder), num_further_layers(imported.config))
        known = {rule.name for rule in rules}
        self.shapes = shapes
        self.left_out = tuple(name for name in stored if name not in known)
        self._stored = {rule.name: tensor for rule, tensor in fitting}
        self._rules_of_rows = RulesOfRows([rule for rule, _ in fitting], shapes)

    def rows(self, name: str, rows: range) -> Tensor:
        """Rows of a parameter in fp32; all of a 0-d one."""
        shape = self.shapes[name]
        block = torch.empty((len(rows), *shape[1:]) if shape else (), dtype=torch.float32)
        for rule in self._rules_of_rows.rules(name, rows):
            tensor = self._stored[rule.name].view()
            for part, theirs in pairs(rule, tensor, self._rules_of_rows.parts(name, rows, block, rule)):
                part.copy_(theirs)
        return block
