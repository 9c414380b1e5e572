"""The parts of `benchmarks/mutants.py`: mutants of the source, and the tests that each is tried on."""
