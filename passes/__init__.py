"""The compiler's middle: `Spec` to `Program`, and the passes that place, shard and connect it. No torch here."""
