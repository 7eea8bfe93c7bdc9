"""Decisions: (desired, observed) → plan. Pure."""
