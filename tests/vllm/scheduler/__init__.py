"""vLLM's own scheduler and the connector on a daemon's core, with a model that needs no kernels."""
