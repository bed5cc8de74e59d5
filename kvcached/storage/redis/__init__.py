"""Blocks in a Valkey or Redis server, which daemons of several machines share."""
