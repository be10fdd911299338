"""The pipeline: records are planned, embedded and written, and a journal remembers what is written."""
