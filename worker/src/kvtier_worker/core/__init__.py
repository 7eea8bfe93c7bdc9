"""Pure decisions: no torch, no asyncio, no clock, no sockets."""
