"""Checks of an engine's environment, as `kvcached doctor` runs them."""
