"""Encryption of what another backend stores."""
