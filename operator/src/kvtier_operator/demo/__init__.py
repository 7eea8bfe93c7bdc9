"""``make demo``: the same prompt answered cold, from device, from host, from the store, and without a store."""
