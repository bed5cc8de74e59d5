"""The decisions: which blocks are cached where, who may write which slot, what is evicted.

Rules of this package: synchronous, deterministic, no I/O, no clock, no randomness, no torch. Time comes in as a number
of milliseconds, what the world did comes in as an event, what the world should do goes out as an effect.
"""
