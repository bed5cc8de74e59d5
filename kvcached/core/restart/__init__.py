"""Trees, sessions and leases from before a restart."""
