"""Orthogonalises matrices by the Newton-Schulz iteration of Muon."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic's, from Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon, "Tuning the coefficients")."""
EPS = 1e-7
"""The least norm that a matrix is divided by."""


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the iteration: bf16 on an accelerator, as in Jordan et al., fp32 on CPU, where bf16 is no faster."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(x: Tensor, steps: int) -> Tensor:
    """Maps the singular values of every matrix of x `[matrices, rows, columns]` to about 1; zeros stay zeros.

    Computes in the dtype of x. After 5 steps singular values of at least 1/1000 of the matrix's norm are between 0.7
    and 1.2.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
