"""`python -m kvcached_client.doctor`."""

from kvcached_client.doctor.checks import main

if __name__ == "__main__":
    main()
