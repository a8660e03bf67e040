"""Runs restores on their own threads, in the order of submission."""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from sglang_hcache.core.errors import RestoreCancelledError, RestoreError, StoreError
from sglang_hcache.core.observer import Observer
from sglang_hcache.device.projector import KVSink, Projector
from sglang_hcache.restore.job import OnOver, RestoreJob, RestoreState
from sglang_hcache.restore.pipeline import LayerPipeline
from sglang_hcache.tier.tiered import TieredStore

logger = logging.getLogger(__name__)

_READER_THREADS = 4


class RestoreEngine:
    """One compute thread and a few readers.

    Args:
        dtype: element type of the stored hidden states.
        on_over: called on the compute thread after each job, whatever its outcome.
    """

    def __init__(
        self,
        tiers: TieredStore,
        projector: Projector,
        sink: KVSink,
        dtype: torch.dtype,
        observer: Observer,
        on_over: OnOver,
    ) -> None:
        self._observer = observer
        self._on_over = on_over
        self._readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="hcache-read")
        self._pipeline = LayerPipeline(tiers, projector, sink, self._readers, dtype)
        self._jobs: queue.SimpleQueue[RestoreJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hcache-restore", daemon=True)
        self._thread.start()

    def submit(self, job: RestoreJob) -> None:
        """Queue ``job``. Never blocks."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queued jobs and stop. Does not wait for a read that hangs."""
        self._jobs.put(None)
        self._thread.join()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                self._run_job(job)
                self._on_over(job)

    def _run_job(self, job: RestoreJob) -> None:
        started = time.monotonic()
        job.state = RestoreState.RUNNING
        outcome = RestoreState.DONE
        try:
            self._pipeline.run(job)
        except RestoreCancelledError:
            outcome = RestoreState.CANCELLED
        except (RestoreError, StoreError) as error:
            logger.warning("hcache: restore of %d tokens failed, recomputing: %s", job.num_tokens, error)
            outcome, job.error = RestoreState.FAILED, error
        except Exception as error:
            logger.exception("hcache: restore of %d tokens failed, recomputing", job.num_tokens)
            outcome, job.error = RestoreState.FAILED, error
        job.seconds = time.monotonic() - started
        self._observer.count(f"restore.{outcome.value}")
        if outcome is RestoreState.DONE:
            self._observer.count("restore.tokens", job.num_tokens)
        job.lease.close()
        job.state = outcome  # last: whoever sees it may use the slots again
