"""Kernels rendered for the layer: the backend for CUDA and AMD devices.

Operators without a kernel run in plain torch, which is right on every device.
"""

from __future__ import annotations

from moec.runtime.backends.torch.torch_backend import (
    count_choices,
    rope,
    rope_backward,
    switch_loss,
    switch_loss_backward,
)
from moec.runtime.backends.triton.triton_experts import expert_mlp, expert_mlp_backward
from moec.runtime.backends.triton.triton_gated import gated, gated_backward
from moec.runtime.backends.triton.triton_mixture import mixture_mlp, mixture_mlp_backward
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

__all__ = [
    "combine",
    "combine_backward",
    "combine_padded",
    "combine_padded_backward",
    "count_choices",
    "count_queues",
    "expert_mlp",
    "expert_mlp_backward",
    "gated",
    "gated_backward",
    "keep_choices",
    "largest_load",
    "mixture_mlp",
    "mixture_mlp_backward",
    "permute",
    "permute_backward",
    "permute_dynamic",
    "permute_padded",
    "permute_padded_backward",
    "queue_starts",
    "rope",
    "rope_backward",
    "route",
    "route_backward",
    "sum_rows",
    "sum_rows_backward",
    "switch_loss",
    "switch_loss_backward",
]
