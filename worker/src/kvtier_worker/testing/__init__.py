"""Fakes behind our own ports; each passes the conformance suite of the real thing."""
