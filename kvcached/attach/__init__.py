"""The attach socket: which process is at the other end, whether it still lives, and the memory it may map."""
