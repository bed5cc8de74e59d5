"""What the doctor asks an engine's own interpreter."""
