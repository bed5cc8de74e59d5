"""Sockets and deadlines: how a client reaches its daemon, and notices that it is gone."""
