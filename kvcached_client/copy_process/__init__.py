"""A process of its own that copies for one shard of an engine in offload mode: nothing is copied in the engine."""
