"""Checks a batch: token ids and labels against the limits of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moec.grammar.spec import Patches, Spec
from moec.grammar.stated import data_parallel_size
from moec.passes.ir.roles import IGNORED_LABEL
from moec.passes.lower.lower_model import context_of

LARGER = (
    "compile it again with a larger one; weights of Hugging Face get their rows before "
    "(docs/huggingface.md#added-tokens)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ids are below `vocab`, sequences at most `context` long; the ranks that share one cut it into `pieces`.

    A rank's batch splits into `routing_groups` equal parts. Tokens with the id `padding` reach no expert.
    """

    vocab: int
    context: int
    pieces: int = 1
    routing_groups: int = 1
    padding: int | None = None

    label_dims: ClassVar[int] = 2
    tokens_per_label: ClassVar[int] = 1

    def labels_of(self, tokens: Tensor) -> int:
        """The number of labels of a batch."""
        return tokens.numel()

    def real_tokens(self, tokens: Tensor) -> int | Tensor:
        """Tokens that are not padding: an int without a padding id, else a tensor on the tokens' device."""
        return tokens.numel() if self.padding is None else (tokens != self.padding).sum()

    def complaint(self, tokens: Tensor, labels: Tensor | None, *, reads_values: bool) -> str | None:
        """Describes the first error of a batch, or None. Without `reads_values` it reads no tensor's values."""
        for name, ids in (("tokens", tokens), ("labels", labels)):
            if ids is None and name == "labels":
                continue
            complaint = self._shape_complaint(name, ids, tokens)
            if complaint is None and reads_values and ids is not None:
                complaint = self._range_complaint(name, ids)
            if complaint:
                return complaint
        return None

    def _shape_complaint(self, name: str, ids: object, tokens: Tensor) -> str | None:
        if not isinstance(ids, Tensor):
            return f"{name} are of class {type(ids).__name__}, and must be a torch.Tensor{_as_tensor(name, ids)}"
        if ids.dtype != torch.int64:
            return f"{name} are {ids.dtype}, and must be torch.int64: `{name}.long()`"
        if ids.dim() != 2:
            batch_of_one = ": `tokens[None]` and `labels[None]` are a batch of one" if ids.dim() == 1 else ""
            return f"{name} have shape {list(ids.shape)}, and must be [batch, sequence]{batch_of_one}"
        if ids.device != tokens.device:
            return f"{name} are on {ids.device}, and tokens on {tokens.device}"
        if ids.shape != tokens.shape:
            moved = ": tokens may be `ids[:, :-1]` and labels `ids[:, 1:]`" if name == "labels" else ""
            return f"{name} have shape {list(ids.shape)}, and tokens {list(tokens.shape)}{moved}"
        if ids.shape[1] > self.context:
            context = f"{self.context} (`context` in the file, else `train.sequence`)"
            remedy = f"cut them, `{name}[:, :{self.context}]`, or compile the file with a longer `context`"
            return f"{name} are {ids.shape[1]} long, and the model's context is {context}: {remedy}"
        if ids.shape[1] % self.pieces:
            fits = ids.shape[1] // self.pieces * self.pieces
            remedy = f"cut them to {fits}, or pad them to {fits + self.pieces}"
            pieces = f"{self.pieces}, the pieces into which ranks cut a sequence"
            return f"{name} are {ids.shape[1]} long, not a multiple of {pieces}: {remedy}"
        if ids.shape[0] % self.routing_groups:
            return (
                f"{name} have {ids.shape[0]} sequences, not a multiple of this rank's {self.routing_groups} "
                "routing groups (`group = rank`)"
            )
        return None

    def _range_complaint(self, name: str, ids: Tensor) -> str | None:
        if ids.numel() == 0:
            return None
        low, high = (int(bound) for bound in ids.aminmax())
        if low == IGNORED_LABEL and name == "labels":
            low = int(ids.masked_fill(ids == IGNORED_LABEL, 0).amin())
        if low >= 0 and high < self.vocab:
            return None
        wrong = low if low < 0 else high
        ignored = f" (labels that are ignored are {IGNORED_LABEL})" if low < 0 and name == "labels" else ""
        if low == IGNORED_LABEL and name == "tokens":
            ignored = f": only labels may have {IGNORED_LABEL}, and they come after the tokens"
        elif high >= self.vocab and not ignored:
            ignored = f": `vocab` in the file is the tokenizer's number of ids; {LARGER}"
        return f"{name} contain the id {wrong}, and the vocabulary is 0 to {self.vocab - 1}{ignored}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Images have the shape `[batch, *image]` and are cut into `tokens_per_label` patches; labels are below `classes`.

    A rank's batch splits into `routing_groups` equal parts.
    """

    image: tuple[int, int, int]
    tokens_per_label: int
    classes: int
    routing_groups: int = 1

    label_dims: ClassVar[int] = 1
    padding: ClassVar[None] = None

    def labels_of(self, images: Tensor) -> int:
        """The number of labels of a batch: one for each image."""
        return images.shape[0]

    def real_tokens(self, images: Tensor) -> int:
        """The patches of a batch."""
        return images.shape[0] * self.tokens_per_label

    def complaint(self, images: Tensor, labels: Tensor | None, *, reads_values: bool) -> str | None:
        """Describes the first error of a batch, or None. Without `reads_values` it reads no tensor's values."""
        batch: object = images
        if not isinstance(batch, Tensor):
            return f"images are of class {type(batch).__name__}, and must be a torch.Tensor"
        if not batch.is_floating_point():
            return f"images are {batch.dtype}, and must be of a floating dtype"
        if batch.dim() != 4 or tuple(batch.shape[1:]) != self.image:
            return f"images have shape {list(batch.shape)}, and must be [batch, {', '.join(map(str, self.image))}]"
        if batch.shape[0] % self.routing_groups:
            return (
                f"there are {batch.shape[0]} images, not a multiple of this rank's {self.routing_groups} routing "
                "groups (`group = rank`)"
            )
        return None if labels is None else self._label_complaint(labels, batch.shape[0], reads_values=reads_values)

    def _label_complaint(self, labels: object, images: int, *, reads_values: bool) -> str | None:
        if not isinstance(labels, Tensor):
            return f"labels are of class {type(labels).__name__}, and must be a torch.Tensor"
        if labels.dtype != torch.int64:
            return f"labels are {labels.dtype}, and must be torch.int64"
        if tuple(labels.shape) != (images,):
            return f"labels have shape {list(labels.shape)}, and must be [batch], one for each of {images} images"
        if not reads_values:
            return None
        wrong = labels[(labels != IGNORED_LABEL) & ((labels < 0) | (labels >= self.classes))]
        if not wrong.numel():
            return None
        ignored = f" (labels that are ignored are {IGNORED_LABEL})" if int(wrong[0]) < 0 else ""
        return f"labels contain the class {int(wrong[0])}, and classes are 0 to {self.classes - 1}{ignored}"


def _as_tensor(name: str, ids: object) -> str:
    """The conversion of the object to a tensor, if torch has one."""
    if type(ids).__module__.partition(".")[0] == "numpy":
        return f": `torch.from_numpy({name}).long()`"
    if isinstance(ids, Mapping):
        return f": give the tensor that is in it, not the {type(ids).__name__}"
    return f": `torch.tensor({name})`" if isinstance(ids, list | tuple) else ""


def device_of(tokens: object) -> torch.device:
    """The device of a batch; CPU if `tokens` is no tensor, so that ranks can still agree on that error."""
    return tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")


def limits_of(spec: Spec, pieces: int = 1, data_size: int = 1) -> Limits | ImageLimits:
    """The limits of a model on `data_size` data-parallel groups, whose ranks cut each sequence into `pieces`."""
    by_rank = any(layer.moe is not None and layer.moe.by_rank for layer in spec.model.layers)
    groups = data_parallel_size(spec) // data_size if by_rank else 1
    patches = spec.model.embedding
    if isinstance(patches, Patches):
        return ImageLimits(
            image=(patches.channels, patches.image, patches.image),
            tokens_per_label=context_of(spec),
            classes=spec.model.outputs,
            routing_groups=max(1, groups),
        )
    return Limits(
        vocab=spec.model.outputs,
        context=context_of(spec),
        pieces=pieces,
        routing_groups=max(1, groups),
        padding=spec.model.embedding.padding_id,
    )
