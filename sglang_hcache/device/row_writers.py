"""Which :class:`~.key_steps.RowWriter` a device has."""

from __future__ import annotations

from sglang_hcache.device.key_steps import RowWriter


def load_row_writer(*, is_cpu: bool) -> RowWriter | None:
    """The one for this device; None where torch's operations must do (no C compiler)."""
    # Imported where they are used: Triton is slow to import, and a CPU has no use for it.
    if is_cpu:
        from sglang_hcache.device.kv_rows import KVRows

        return KVRows.load()
    from sglang_hcache.device.triton_rows import TritonRows

    return TritonRows()
