"""Ray: the server as replicas on a cluster."""
