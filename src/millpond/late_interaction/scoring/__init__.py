"""MaxSim, and what explains a score."""
