"""KV cache events for routers: vLLM's format and sockets, and a snapshot of the index."""
