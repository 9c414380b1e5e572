"""Log-probabilities of labels, without gathering logits whose vocabulary is sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.passes.ir.roles import IGNORED_LABEL
from moec.runtime.ops.dense_collectives import all_gather_alike, all_reduce, all_reduce_max
from moec.runtime.ops.sharded_vocabulary import label_logit
from moec.runtime.ranks.groups import resolve

SEQUENCE, VOCABULARY = 1, 2
SITE = "log-probabilities"


def label_log_probabilities(logits: Tensor, labels: Tensor, sharded_dim: int | None, group: str) -> Tensor:
    """log softmax(logits)[label] of each token, at least fp32 `[batch, sequence]`; 0 where a label is ignored.

    logits `[batch, sequence, vocab]`, sharded over `group` along `sharded_dim` (None: not sharded); labels `[batch,
    sequence]` of whole sequences. Labels and the result are the same on all ranks of the group.
    """
    wide_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sharded_dim == VOCABULARY:
        largest = all_reduce_max(wide_logits.detach().amax(-1), group, SITE)
        sums = all_reduce((wide_logits - largest[..., None]).exp().sum(-1), group, SITE)
        logprobs: Tensor = all_reduce(label_logit(wide_logits, labels, group), group, SITE) - largest - sums.log()
        return logprobs.where(labels != IGNORED_LABEL, 0)
    if sharded_dim == SEQUENCE:
        peers = resolve(group)
        local_labels = labels.chunk(peers.size(), SEQUENCE)[peers.rank()]
        gathered: Tensor = all_gather_alike(_full_vocabulary_logprobs(wide_logits, local_labels), SEQUENCE, group, SITE)
        return gathered
    return _full_vocabulary_logprobs(wide_logits, labels)


def _full_vocabulary_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels != IGNORED_LABEL
    picked = logits.log_softmax(-1).gather(-1, labels.where(valid, 0)[..., None]).squeeze(-1)
    return picked.where(valid, 0)
