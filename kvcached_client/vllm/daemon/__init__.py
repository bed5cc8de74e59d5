"""The thread that talks with the daemon, so that the scheduler never waits for it."""
