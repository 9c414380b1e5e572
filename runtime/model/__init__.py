"""A plan as one `torch.nn.Module`."""
