"""Blocks of KV in memory: how they are laid out, and how they are copied."""
