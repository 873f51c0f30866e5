"""The names behind tenants' scopes: the directory holds digests alone, and names come with plans."""

from collections import OrderedDict

__all__ = ["TenantNames"]

_REMEMBERED = 10_000


class TenantNames:
    """Of the tenants that have planned here; those that planned longest ago are forgotten first."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def remember(self, scope: str, tenant: str) -> None:
        """A tenant plans."""
        self._names[scope] = tenant
        self._names.move_to_end(scope)
        if len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)

    def name_of(self, scope: str) -> str:
        """The tenant's name; its scope where it is not known."""
        return self._names.get(scope, scope)
