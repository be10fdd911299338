"""Plans: one module for each shape of block."""
