"""MemoryIndex: token matrices in memory, compared exactly or by their centroid codes first."""
