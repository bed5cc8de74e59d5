"""What the connectors of several engines use: the session of an engine in one process, digests of weight files."""
