"""Which blocks are where: a radix tree of runs for each namespace."""
