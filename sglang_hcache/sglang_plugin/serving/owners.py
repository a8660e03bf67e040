"""Whose the namespaces of the disk tier are, for those who look after it: ``hcache store ls --namespaces``."""

from __future__ import annotations

import hashlib

from sglang_hcache.core.keys import Namespace
from sglang_hcache.tier.tiered import TieredStore

_DIGITS = 8
_MOST_KNOWN = 1000


class Owners:
    """Notes of each namespace that is saved its model, weights, tenant and adapter; of the last three some digits.

    A tenant may be a secret or a person's name: its hash tells whoever knows it already.
    """

    def __init__(self, tiers: TieredStore, model: str) -> None:
        self._tiers = tiers
        self._model = model
        self._known: set[bytes] = set()
        """Their ids; no tenant stays in memory for it."""

    def note(self, namespace: Namespace) -> None:
        """``namespace`` is about to be saved. Memory only."""
        disk = self._tiers.disk
        if disk is None or (name := namespace.namespace_id()) in self._known:
            return
        if len(self._known) >= _MOST_KNOWN:  # what is used still is noted again, as one of the latest
            self._known.clear()
        self._known.add(name)
        owner = {"model": self._model, "weights": namespace.model.hex()[:_DIGITS]}
        if namespace.tenant is not None:
            tenant = namespace.tenant.encode("utf-8", "surrogatepass")
            owner["tenant"] = hashlib.sha256(tenant).hexdigest()[:_DIGITS]
        if namespace.adapter is not None:
            owner["adapter"] = namespace.adapter.hex()[:_DIGITS]
        disk.namespaces.put(name.hex(), owner)
