"""Routes for clients of other services: one small file a family, each a translation to the service's own routes.

A family turns its body into the service's own, which is checked as ever, and the service's own answer into its own.
"""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from service.families import openai

FAMILIES: Mapping[str, ModuleType] = MappingProxyType({"openai": openai})
