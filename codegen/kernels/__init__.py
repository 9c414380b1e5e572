"""The kernels: their shapes and tiles, their source rendered from templates, and which of them a plan launches."""
