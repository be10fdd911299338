"""The parts of `benchmarks/light.py`."""
