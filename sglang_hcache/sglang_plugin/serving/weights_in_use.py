"""Which weights are in use, and whether all KV on the device is of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_hcache.core.keys import Namespace
from sglang_hcache.core.layout import StateLayout
from sglang_hcache.sglang_plugin.seam.model import ServedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WeightsInUse:
    """For one server; everything runs on the scheduler's thread."""

    _model: ServedModel
    _layout: StateLayout
    namespace: Namespace | None
    """That of requests without a tenant. None: it must be read anew, for the weights may be others now, or away."""
    _last: Namespace | None = None
    """What was known of them last."""
    on_device: Namespace | None = None
    """Whose KV came to the device last; None: there is none."""
    device_is_stale: bool = False
    """What is on the device was not all computed with the present weights."""

    def will_change(self) -> None:
        """They are about to be replaced or released."""
        if self.namespace is not None:
            self._last, self.namespace = self.namespace, None

    def read(self) -> tuple[Namespace, bool]:
        """The namespace, from the weights, and whether they are others than before.

        They are not after an update that failed, or where memory was only lent.
        """
        self.namespace = self._model.namespace(self._layout, self._model.weights())
        self.device_is_stale |= self.on_device not in (None, self.namespace)
        logger.info("hcache: weights were updated; namespace %s", self.namespace.namespace_id().hex())
        if self.device_is_stale:
            logger.warning(
                "hcache: KV of earlier weights is on the device: nothing is saved until /flush_cache"
            )
        return self.namespace, self.namespace != self._last

    def device_reset(self) -> None:
        """The device dropped everything."""
        self.on_device, self.device_is_stale = None, False
