"""The backend in torch: the reference, every family of the table, and GPUs."""
