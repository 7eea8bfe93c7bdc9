"""Builders: record → the process or manifest that realises it, one kind a file. Pure."""
