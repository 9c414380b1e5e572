"""Input and output of commands: files, tables, documents, progress."""
