"""Whether a forward pass is computed again in backward."""

import torch


def in_backward() -> bool:
    """Whether this thread is in a backward pass, where `torch.utils.checkpoint` computes a forward pass again."""
    return torch._C._current_graph_task_id() != -1
