"""The door: checks every KVCacheCluster before the API server takes it, and keeps the certificates that it needs.

`rules` decides (pure), `review` speaks the API server's language (pure), `certificates` says when to make new ones
(pure); `server`, `keeper` and `run` do it.
"""
