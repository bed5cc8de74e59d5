"""Workers hold the memory of a pool and copy in it, one process per shard; the daemon only gives orders.

What runs inside a worker imports the standard library, msgspec and xxhash only, so that it is there in a fraction of a
second.
"""
