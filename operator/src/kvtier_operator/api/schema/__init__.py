"""The API, described once: `SPEC` and `STATUS` say every field, and everything else is rendered from them. Pure."""

from kvtier_operator.api.schema.crd import custom_resource_definition
from kvtier_operator.api.schema.spec import DOCUMENT, SPEC
from kvtier_operator.api.schema.status import STATUS

__all__ = ["DOCUMENT", "SPEC", "STATUS", "custom_resource_definition"]
