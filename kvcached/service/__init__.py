"""One request, one reply: what the daemon does between its sockets and its core."""
