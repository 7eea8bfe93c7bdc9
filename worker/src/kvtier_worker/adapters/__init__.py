"""Implementations of the engine's ports; strangers to one another."""
