"""The scheduler's side: which blocks a request loads and stores, decided for one engine."""
