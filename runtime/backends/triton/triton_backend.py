# ruff: noqa: F401  (operators are called by name)
"""Kernels rendered for the layer: the backend for CUDA and AMD devices.

Operators without a kernel run in plain torch, which is right on every device.
"""

from __future__ import annotations

from moec.runtime.backends.torch.torch_assignment import balanced_assignment
from moec.runtime.backends.torch.torch_expert_linear import (
    expert_linear,
    expert_linear_backward,
    expert_linear_backward_split,
)
from moec.runtime.backends.torch.torch_group_gates import choose_tokens
from moec.runtime.backends.torch.torch_queues import keep_best, keep_first, reroute
from moec.runtime.backends.torch.torch_random import jitter, normal_noise, token_keys
from moec.runtime.backends.torch.torch_rope import rope, rope_backward
from moec.runtime.backends.torch.torch_routing import count_choices, switch_loss, switch_loss_backward
from moec.runtime.backends.triton.triton_experts import expert_mlp, expert_mlp_backward, expert_mlp_backward_split
from moec.runtime.backends.triton.triton_gated import gated, gated_backward
from moec.runtime.backends.triton.triton_mixture import mixture_mlp, mixture_mlp_backward, mixture_mlp_backward_split
from moec.runtime.backends.triton.triton_padded import (
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
from moec.runtime.backends.triton.triton_routing import route, route_backward
from moec.runtime.backends.triton.triton_rows import (
    combine,
    combine_backward,
    permute,
    permute_backward,
    sum_rows,
    sum_rows_backward,
)
from moec.runtime.backends.triton.triton_slots import assign_slots
