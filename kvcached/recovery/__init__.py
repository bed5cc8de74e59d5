"""What outlives a daemon, and how the next one takes it over."""
