"""The backend in torch: the reference, every family of the table, and GPUs."""

from millpond.backends.torch import inherited_pool as inherited_pool  # first: it sees whether torch was there before
