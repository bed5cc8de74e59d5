"""Which cached blocks go first."""
