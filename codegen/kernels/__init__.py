"""The kernels: their shapes and tiles, their source rendered from templates, and the kernels that a plan launches."""
