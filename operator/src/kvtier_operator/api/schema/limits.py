"""Limits that several parts of the API share. Pure."""

from __future__ import annotations

MIN_SEGMENT_BYTES = 16 * 2**20
"""Mooncake refuses smaller segments."""

FIRST_PORT, LAST_PORT = 1024, 65535
FIRST_NODE_PORT, LAST_NODE_PORT = 30000, 32767
"""Kubernetes forwards these ports of every node to Services."""

MAX_SET_NAME = 52
"""Characters of a StatefulSet's name: its pods carry it with a hash of ten characters in a label of 63."""

REVISION_LENGTH = 8
MAX_ROLES = 6

TAKEN_ROLE_NAMES = ("api", "etcd", "leader", "master", "ports", "router", "store")
"""Names of the cluster's other children; ``store-*`` too."""
