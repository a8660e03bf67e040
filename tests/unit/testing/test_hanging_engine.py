"""What hangs on purpose hangs until it is let go, and no longer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from sglang_hcache.store import aligned_empty
from sglang_hcache.store.io.engine import Batch, IOKind, IOOp, OpenFile
from sglang_hcache.store.io.posix import PosixEngine
from sglang_hcache.testing.io_faults import HangingEngine


def test_what_begins_to_hang_while_all_is_let_go_ends_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    file = OpenFile(os.open(path, os.O_RDONLY), direct=False)
    letting_go: list[threading.Thread] = []

    def hangs(_: IOOp) -> bool:
        letting_go.append(threading.Thread(target=engine.let_go))
        letting_go[0].start()
        letting_go[0].join(0.2)  # it comes first, if it may
        return True

    engine = HangingEngine(PosixEngine(1, 1), hangs)
    batch = Batch([IOOp(IOKind.READ, 0, file, 0, (aligned_empty(4096),))])
    engine.submit(batch, [0])
    (result,) = batch.wait(5.0)
    assert result.error is None
    letting_go[0].join()
    assert engine.close(5.0)
