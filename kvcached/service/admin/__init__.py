"""The requests of administrators."""
