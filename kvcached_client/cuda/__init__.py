"""Device memory on CUDA. Needs the extra `kvcached-client[cuda]`; nothing else of the client imports this package."""
