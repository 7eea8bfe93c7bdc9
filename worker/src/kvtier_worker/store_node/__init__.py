"""The storage daemon: a mounted Mooncake segment with health, metrics and a graceful end."""
