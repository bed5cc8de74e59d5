"""``python -m kvcached``: the same as the command ``kvcached``."""

from kvcached.cli import main

main()
