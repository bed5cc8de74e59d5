"""The configuration: one schema, and one voice for what is wrong with it."""
