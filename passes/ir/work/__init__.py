"""The cost of ops: operations, bytes, and the activations that are saved for backward."""
