"""The folder layouts in which checkpoints are published."""
