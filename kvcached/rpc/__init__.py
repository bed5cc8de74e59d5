"""The ZeroMQ side: sockets and frames, no decisions."""
