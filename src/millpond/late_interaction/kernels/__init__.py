"""Late-interaction kernels: compiled where this processor has them, numpy and torch elsewhere."""
