"""`kvcached demo`: what the cache does for an engine, for its successor, and for another replica."""
