"""How the rows of an index are stored in few bits."""
