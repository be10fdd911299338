"""Launch: sockets, protocol, process settings, and the running server."""
