"""The parts of `benchmarks/speed.py`, a question each."""
