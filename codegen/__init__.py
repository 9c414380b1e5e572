"""Makes the `Plan` of a Program: its data, its folder, its kernels, and the torch.fx modules built from it."""
