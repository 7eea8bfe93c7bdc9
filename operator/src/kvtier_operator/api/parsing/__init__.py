"""The one parser of a KVCacheCluster: an untyped document becomes records, or all its violations at once. Pure."""

from kvtier_operator.api.parsing.document import parse

__all__ = ["parse"]
