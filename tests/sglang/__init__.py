"""Real SGLang processes on a real daemon, and what SGLang loads without SGLang."""
