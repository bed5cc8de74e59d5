"""Copies between tiers, from their reservation to what follows from their end."""
