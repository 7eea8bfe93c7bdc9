"""`kvtier operator`: keeps KVCacheClusters of a Kubernetes API as their specs say."""
