"""Views of the core that change nothing."""
