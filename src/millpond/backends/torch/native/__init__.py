"""Native: a backbone's forward pass in one call of the compiled kernels."""
