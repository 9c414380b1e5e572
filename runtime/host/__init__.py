"""A mixture as a layer in a model of a script's own."""
