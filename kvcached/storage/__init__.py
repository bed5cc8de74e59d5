"""Storage below the host pool: the contract of backends, the frame of a block, the process that does the I/O."""
