"""Pages about a run: one HTML file each, which loads nothing."""
