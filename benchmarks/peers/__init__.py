"""The comparison with other engines: modules of `benchmarks/compare.py` and of the other benchmark scripts."""
