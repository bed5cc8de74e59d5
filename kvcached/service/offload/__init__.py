"""Engines in offload mode: their sessions, and their requests."""
