"""Every error this package raises on purpose.

::

    HCacheError
    +-- ConfigError          a setting is wrong or not supported: names the flag and the fix
    +-- SelfCheckError       the projector does not reproduce the KV pool: refuse to serve
    +-- StoreError
    |   +-- StoreLockedError     another process uses the directory
    |   +-- StoreFormatError     a directory holds something we do not understand
    |   +-- StoreFullError       the cap or the free-space floor forbids a write
    |   |   +-- WriteBudgetError     the day's write budget forbids it
    |   +-- StoreIOError         the device failed or is gone
    |   |   +-- StoreTimeoutError    the device is late and may still touch the memory it was given
    |   +-- CorruptExtentError   bytes read are not the bytes written
    +-- TierMissError        a chunk that was promised is not there any more
    +-- RestoreError
        +-- RestoreCancelledError     the request went away
        +-- RestoreTimeoutError       the restore overran its deadline

``ValueError`` is for a wrong argument to a public function, ``AssertionError`` for our own bugs.
"""

from __future__ import annotations


class HCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(HCacheError):
    """A setting is wrong or unsupported. The message names the flag, the value and what is allowed."""


class SelfCheckError(HCacheError):
    """Projected hidden states differ from the KV pool by more than the tolerance."""


class StoreError(HCacheError):
    """Base of the disk store's errors."""


class StoreLockedError(StoreError):
    """Another process holds the lock of a store directory."""


class StoreFormatError(StoreError):
    """A directory or a file of it has a format this version cannot read."""


class StoreFullError(StoreError):
    """The size cap or the free-space floor leaves no room, and nothing can be evicted."""


class WriteBudgetError(StoreFullError):
    """As much was written today as ``--hcache-disk-write-budget`` allows."""


class StoreIOError(StoreError):
    """A read or write failed or came short, or its file or directory is gone."""


class StoreTimeoutError(StoreIOError):
    """An operation overran its deadline. It may still end: the memory it was given must not be used again."""


class CorruptExtentError(StoreError):
    """An extent's identity or digest does not match what was written."""


class TierMissError(HCacheError):
    """A chunk that was looked up is no longer in any tier."""


class RestoreError(HCacheError):
    """A restore failed; its request is recomputed."""


class RestoreCancelledError(RestoreError):
    """The request that asked for the restore was aborted."""


class RestoreTimeoutError(RestoreError):
    """The restore overran its deadline."""
