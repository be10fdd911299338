"""Classes of other projects over the engine."""
