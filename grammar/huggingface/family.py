"""A `model_type`: how its config is read, and how its tensors are stored."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.rules import Rule
from moec.grammar.spec import DType, KeptPart, Model

Read = Callable[[Config], Model]
Rules = Callable[[Model, Container[str] | None], Sequence[Rule]]
Keys = Callable[[Model], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type` of transformers.

    `read` makes the model of a config; `rules` gives the tensors of a model: as transformers saves them, or, given the
    names that a checkpoint has, as these lie. `keys` are the config keys that mean something else here than in other
    families (`keys.py` has those). `ignored`: keys without an effect on logits. `skipped`: patterns of tensors that
    checkpoints have and the model does not use; `extra_layers`: those of layers beyond the model's depth too, which
    predict further tokens. `defaults`: keys that a config may leave out, with the values of transformers' class, where
    these are not those that `read` has for every family. `aliases`: other names of keys, with the keys (the class's
    `attribute_map`). `fp32`: parameters that transformers keeps in fp32 in a model of bf16 too, beside online
    biases.
    """

    model_type: str
    architecture: str
    read: Read
    rules: Rules
    keys: Keys = lambda model: {}
    ignored: frozenset[str] = field(default_factory=frozenset)
    skipped: tuple[str, ...] = ()
    extra_layers: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    fp32: tuple[KeptPart, ...] = ()

    def model_of(self, config: Config) -> Model:
        """The model of a config, whose mistakes are then in `config`."""
        config.defaults = self.defaults
        config.rename(self.aliases)
        model = self.read(config)
        if model.dtype is DType.FP32:
            return model
        return model.replace(keep_in_fp32=tuple(part for part in self.fp32 if model.has(part)))
