"""Sealed shared memory, and what lies in it."""
