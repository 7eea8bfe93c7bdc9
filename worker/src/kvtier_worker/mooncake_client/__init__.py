"""Handling of the vendor's client that does not depend on who uses it: import, environment, life cycle."""
