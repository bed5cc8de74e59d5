"""What kvcached promises in figures, measured. Run as ``python -m benchmarks``; `README.md` has the method."""
