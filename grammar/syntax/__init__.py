"""Text to syntax tree: tokens, the generated tables, the parser that runs them, and the tree's nodes."""
