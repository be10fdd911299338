"""Execute: batches packed and run, by workers, on a CPU's cores or a GPU."""
