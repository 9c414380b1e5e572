"""The language: `.moe` text in, a validated `Spec` or a list of diagnostics out."""
