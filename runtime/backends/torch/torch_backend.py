# ruff: noqa: F401  (operators are called by name)
"""Plain torch: the definition of correct, and the backend for CPU.

Low-precision tensors are computed in float32 and rounded: a sum once, a gated activation after each of its two
products. Sums gather their terms in a fixed order, so every result is deterministic.
"""

from __future__ import annotations

from moec.runtime.backends.torch.torch_activations import gated, gated_backward
from moec.runtime.backends.torch.torch_assignment import balanced_assignment
from moec.runtime.backends.torch.torch_expert_linear import (
    expert_linear,
    expert_linear_backward,
    expert_linear_backward_split,
)
from moec.runtime.backends.torch.torch_experts import expert_mlp, expert_mlp_backward, expert_mlp_backward_split
from moec.runtime.backends.torch.torch_group_gates import choose_tokens
from moec.runtime.backends.torch.torch_mixture import mixture_mlp, mixture_mlp_backward, mixture_mlp_backward_split
from moec.runtime.backends.torch.torch_padded import (
    combine_padded,
    combine_padded_backward,
    count_queues,
    keep_choices,
    largest_load,
    permute_dynamic,
    permute_padded,
    permute_padded_backward,
    queue_starts,
)
from moec.runtime.backends.torch.torch_queues import keep_best, keep_first, reroute
from moec.runtime.backends.torch.torch_random import jitter, normal_noise, token_keys
from moec.runtime.backends.torch.torch_rope import rope, rope_backward
from moec.runtime.backends.torch.torch_routing import (
    count_choices,
    route,
    route_backward,
    switch_loss,
    switch_loss_backward,
)
from moec.runtime.backends.torch.torch_rows import (
    combine,
    combine_backward,
    permute,
    permute_backward,
    sum_rows,
    sum_rows_backward,
)
from moec.runtime.backends.torch.torch_slots import assign_slots
