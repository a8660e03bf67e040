"""Runs restores on their own threads, in the order of submission."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from sglang_hcache.core.errors import RestoreCancelledError, RestoreError, StoreError
from sglang_hcache.core.observer import Observer
from sglang_hcache.core.throttle import Throttle
from sglang_hcache.restore.job import RestoreJob, RestoreState
from sglang_hcache.restore.pipeline import LayerPipeline

logger = logging.getLogger(__name__)

_CLOSE_S = 1.0


class RestoreEngine:
    """One compute thread over a pipeline.

    Args:
        pipeline: closed with the engine.
        observer: told of errors that nobody foresaw. How a restore ended is known where all of its parts are.
        on_change: called on the compute thread when a job is CERTAIN, and when it is over, whatever its outcome.
    """

    def __init__(self, pipeline: LayerPipeline, observer: Observer, on_change: Callable[[], None]) -> None:
        self._pipeline = pipeline
        self._observer = observer
        self._may_warn = Throttle()
        self._may_trace = Throttle()  # of its own: what everybody expects must not hide what nobody does
        self._on_change = on_change
        self._stopping = threading.Event()
        self._job: RestoreJob | None = None
        self._jobs: queue.SimpleQueue[RestoreJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hcache-restore", daemon=True)
        self._thread.start()

    def submit(self, job: RestoreJob) -> None:
        """Queue ``job``. Never blocks."""
        self._jobs.put(job)

    def close(self) -> None:
        """Cancel what is queued or running and stop. A read that hangs is not waited for."""
        self._stopping.set()
        self._jobs.put(None)
        if (job := self._job) is not None:
            job.cancel()
        self._thread.join(_CLOSE_S)
        self._pipeline.close()

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                self._job = job
                if self._stopping.is_set():
                    job.cancel()
                self._run_job(job)
                self._on_change()

    def _run_job(self, job: RestoreJob) -> None:
        job.started = time.monotonic()
        if not job.begin():
            return  # whoever cancelled it has closed its leases
        outcome = RestoreState.DONE
        try:
            self._pipeline.run(job, self._on_change)
        except RestoreCancelledError:
            outcome = RestoreState.CANCELLED
        except (RestoreError, StoreError) as error:
            if self._may_warn():
                logger.warning("hcache: a restore of %d tokens failed: %s", job.num_tokens, error)
            outcome, job.error = RestoreState.FAILED, error
        except Exception as error:
            # Every job of a process that ends fails like this, and there may be hundreds.
            if self._may_trace():
                logger.exception("hcache: restore of %d tokens failed", job.num_tokens)
            self._observer.count("restore.errors")
            outcome, job.error = RestoreState.FAILED, error
        job.ended = time.monotonic()
        job.seconds = job.ran_s(job.ended)
        try:
            job.let_go()
            logger.debug(
                "hcache: restore of %d tokens: %s in %.3f s (waited for reads %.3f s, wrote K and V %.3f s) after "
                "%.3f s in the queue", job.num_tokens, outcome.value, job.seconds, job.waited_s, job.written_s,
                job.queued_s,
            )  # fmt: skip
        except Exception:
            if self._may_trace():
                logger.exception("hcache: a restore did not end as it should")
            self._observer.count("restore.errors")
        finally:  # or every request that finds something would wait for ever
            job.state = outcome  # last: whoever sees it may use the slots again
