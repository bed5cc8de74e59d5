"""Storage in files of a directory."""
