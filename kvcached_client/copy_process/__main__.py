"""`python -m kvcached_client.copy_process`."""

import sys

from kvcached_client.copy_process.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
