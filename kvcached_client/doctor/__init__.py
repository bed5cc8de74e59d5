"""Checks that `kvcached doctor` runs in an engine's own interpreter."""
