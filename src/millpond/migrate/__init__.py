"""Migration: the model, the widths or the chunks of a collection are changed while it is searched and written to."""
