"""kvtier's operator side: one parser of KVCacheCluster and what is built from it."""
