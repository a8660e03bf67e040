"""Names of chunks: a hash chain over the namespace and the tokens.

``key[i] = H(key[i-1] || tokens of chunk i)`` and ``key[-1] = H(namespace)``, with H = BLAKE2b of
32 bytes. Tokens are framed as little-endian int64, 64 of them a chunk, so no two different inputs
share an encoding; tenants share a store, hence a cryptographic hash.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hcache.core.layout import CHUNK_TOKENS

KEY_BYTES = 32
NAMESPACE_ID_BYTES = 16

ChunkKey = bytes
"""32 bytes that name a chunk everywhere."""


def _framed(fields: Sequence[tuple[str, bytes]]) -> bytes:
    """Name and value of each field, each with its length in front, so that ``a+bc != ab+c``."""
    parts = []
    for name, value in fields:
        for piece in (name.encode(), value):
            parts.append(len(piece).to_bytes(8, "little"))
            parts.append(piece)
    return b"".join(parts)


def _hash(person: bytes, data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size, person=person).digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for a stored chunk to be reused.

    Args:
        model: fingerprint of the weights.
        layout: the stored state's layout as text, with what else makes K and V: architecture, configuration, dtypes,
            number of ranks, quantisation, device, attention backends.
        tenant: the request's ``extra_key`` (SGLang folds ``cache_salt`` into it); None for none.
        adapter: fingerprint of the LoRA adapter that its tokens are computed with; None for none.
        rank: number of the rank whose part of the heads is stored; None where one has all of them.
    """

    model: bytes
    layout: str
    tenant: str | None = None
    adapter: bytes | None = None
    rank: int | None = None

    def _fields(self) -> list[tuple[str, bytes]]:
        fields = [("model", self.model), ("layout", self.layout.encode())]
        if self.tenant is not None:
            fields.append(("tenant", self.tenant.encode("utf-8", "surrogatepass")))
        if self.adapter is not None:
            fields.append(("adapter", self.adapter))
        return fields

    def root_key(self) -> ChunkKey:
        """The chain's start: 32 bytes."""
        rank = [] if self.rank is None else [("rank", str(self.rank).encode())]
        return _hash(b"hcache-ns-1", _framed(self._fields() + rank), KEY_BYTES)

    def namespace_id(self) -> bytes:
        """16 bytes that name this namespace in the stores of all ranks: a tenant is erased from all of them by it."""
        return _hash(b"hcache-nsid-1", _framed(self._fields()), NAMESPACE_ID_BYTES)


_CHUNK_HASH = hashlib.blake2b(digest_size=KEY_BYTES, person=b"hcache-chunk-1")
"""Of nothing yet. To copy it takes half as long as to make one: a prompt of 16,384 tokens has 256 keys."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """``tokens`` as little-endian int64, 8 bytes each."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
    if sys.byteorder == "big":
        packed = array("q", packed)
        packed.byteswap()
    return packed.tobytes()


def next_key(parent: ChunkKey, chunk_token_bytes: bytes) -> ChunkKey:
    """Key of the chunk whose tokens (512 bytes, see :func:`token_bytes`) follow ``parent``."""
    if len(chunk_token_bytes) != 8 * CHUNK_TOKENS:
        raise ValueError(f"a chunk has {CHUNK_TOKENS} tokens, got {len(chunk_token_bytes) / 8}")
    return _key_behind(parent, chunk_token_bytes)


def _key_behind(parent: ChunkKey, chunk_token_bytes: bytes | memoryview) -> ChunkKey:
    chain = _CHUNK_HASH.copy()
    chain.update(parent)
    chain.update(chunk_token_bytes)
    return chain.digest()


def chunk_keys(root: ChunkKey, tokens: Sequence[int]) -> list[ChunkKey]:
    """Keys of the whole chunks of ``tokens``, which start at position 0; a tail of under 64 is left out."""
    packed = memoryview(token_bytes(tokens))
    step = 8 * CHUNK_TOKENS
    key, keys = root, []
    for start in range(0, len(packed) - step + 1, step):
        key = _key_behind(key, packed[start : start + step])
        keys.append(key)
    return keys
