"""`kvtier up` and `kvtier status`: a KVCacheCluster as processes of one machine."""
