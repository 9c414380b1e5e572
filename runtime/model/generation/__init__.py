"""New tokens behind prompts."""
