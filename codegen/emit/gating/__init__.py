"""How ops of gates are emitted."""
