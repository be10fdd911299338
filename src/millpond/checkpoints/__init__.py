"""Files on disk or on the hub, read into plain descriptions. Nothing here builds a network."""
