"""A disk of this machine in front of storage that is further away."""
