"""Who may touch a slot."""
