"""The messages between clients and the daemon, as both encode and check them."""
