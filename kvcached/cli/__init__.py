"""The commands, and words for people."""
