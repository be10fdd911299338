"""Schedule: calls, their requests, and the order in which these form batches."""
