"""The parts of the comparison that `benchmarks/compare.py` runs."""
