"""kvtier's worker side: the engine, its three cache tiers, the storage node."""
