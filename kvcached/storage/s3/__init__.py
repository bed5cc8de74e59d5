"""The backend `s3`: blocks in a bucket that daemons of several machines share."""
