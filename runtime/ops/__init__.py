# ruff: noqa: F401  (operators are called by name)
"""The operators that compiled graphs are made of, registered as `torch.ops.moec.*` on import.

Each has a fake (so that FX, `torch.compile` and export see through it), an autograd rule made of registered operators,
and its arithmetic in a backend (`moec.runtime.backends`). None aliases its inputs, and only `cached_attention` of
generation, which has no gradient, mutates one. Letters in shapes: B sequences, S tokens each, D model dim, E experts, k
choices, R rows, F hidden width, G parts of an activation (2 if gated, else 1). The collectives, in
`ragged_collectives.py` and `dense_collectives.py`, are operators of the same kind.
"""

from __future__ import annotations

from moec.runtime.ops import dense_collectives, ragged_collectives, sharded_vocabulary
from moec.runtime.ops.assign_slots import assign_slots
from moec.runtime.ops.balance_terms import count_choices, switch_loss
from moec.runtime.ops.cached_attention import cached_attention, turn
from moec.runtime.ops.elementwise import gated, rope
from moec.runtime.ops.embed import embed
from moec.runtime.ops.expert_linear import expert_linear, expert_linear_backward
from moec.runtime.ops.expert_mlp import expert_mlp
from moec.runtime.ops.layer_norm import layer_norm
from moec.runtime.ops.masked_attention import masked_attention
from moec.runtime.ops.mixture_mlp import mixture_mlp, mixture_of_few
from moec.runtime.ops.padded_rows import (
    combine_padded,
    count_queues,
    keep_choices,
    largest_load,
    permute_dynamic,
    permute_padded,
    queue_starts,
)
from moec.runtime.ops.queues import balanced_assignment, choose_tokens, keep_best, keep_first, reroute
from moec.runtime.ops.random_numbers import jitter, normal_noise, token_keys
from moec.runtime.ops.recomputed_experts import expert_mlp_recomputed, mixture_mlp_recomputed
from moec.runtime.ops.routing import note_scores, route
from moec.runtime.ops.rows import combine, permute
from moec.runtime.ops.weighted_rows import permute_weights, sum_rows
