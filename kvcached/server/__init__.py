"""The two sockets: bytes in, bytes out."""
