"""What the daemon needs of other processes: who they are, and messages to and from them."""
