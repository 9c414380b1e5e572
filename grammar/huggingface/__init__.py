"""Hugging Face's `config.json` and tensor names, to a `Spec` and back. Needs neither torch nor transformers."""
