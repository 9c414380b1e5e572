"""Log-probabilities of labels, without gathering logits, whose vocabulary or sequence may be sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.passes.ir import Layout
from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.ops.dense_collectives import all_reduce, all_reduce_max, whole_along
from moec.runtime.ops.sharded_vocabulary import label_logit
from moec.runtime.ranks.groups import resolve

SEQUENCE, VOCABULARY = 1, 2
SITE = "log-probabilities"


def label_log_probabilities(logits: Tensor, labels: Tensor, layout: Layout, groups: str) -> Tensor:
    """log softmax(logits)[label] of each token, at least fp32 `[batch, sequence]`; 0 where a label is ignored.

    logits `[batch, sequence, vocab]` lie as `layout` says, over the groups whose names begin with `groups`; labels
    `[batch, sequence]` are of whole sequences. Labels and the result are the same on all ranks that share sequences.
    """
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for axis in layout.cuts(SEQUENCE):
        peers = resolve(groups + axis)
        labels = labels.chunk(peers.size(), SEQUENCE)[peers.rank()]
    if cuts := layout.cuts(VOCABULARY):
        (axis,) = cuts
        logprobs = _sharded_vocabulary_logprobs(wide_logits, labels, groups + axis)
    else:
        logprobs = _full_vocabulary_logprobs(wide_logits, labels)
    return whole_along(logprobs, layout, (SEQUENCE,), groups, SITE)


def _sharded_vocabulary_logprobs(logits: Tensor, labels: Tensor, group: str) -> Tensor:
    largest = all_reduce_max(logits.detach().amax(-1), group, SITE)
    sums = all_reduce((logits - largest[..., None]).exp().sum(-1), group, SITE)
    logprobs: Tensor = all_reduce(label_logit(logits, labels, group), group, SITE) - largest - sums.log()
    return logprobs.where(labels != IGNORED_LABEL, 0)


def _full_vocabulary_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels != IGNORED_LABEL
    picked = logits.log_softmax(-1).gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    return picked.where(valid, 0)
