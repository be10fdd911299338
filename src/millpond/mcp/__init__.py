"""Search for agents, by the Model Context Protocol: over a folder of files, an index or a collection."""
