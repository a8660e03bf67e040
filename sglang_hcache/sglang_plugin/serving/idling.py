"""What a scheduler round waits for when only our threads have work: SGLang's idle loop spins."""

from __future__ import annotations

from sglang_hcache.sglang_plugin.serving.restores import RestoreCoordinator
from sglang_hcache.sglang_plugin.serving.saving import Saving


class Idling:
    """Yields the interpreter to the other threads. Used on the scheduler's."""

    def __init__(self, restores: RestoreCoordinator, saving: Saving) -> None:
        self._restores = restores
        self._saving = saving
        self._let_in = False
        """Whether the last time was skipped for somebody in the queue."""
        self._let_save = True
        """Whether the last pause for what is saved was taken: ranks save at their own pace."""

    def pause(self) -> None:
        """A moment, before SGLang looks at its queue, unless somebody there would be held up."""
        restores, running = self._restores, self._restores.running
        if restores.scheduler.is_running() or running.is_recomputing:
            return
        # Who is still there at the next round lacks room: do not spin until there is some.
        if running.tokens:
            self._let_in = not self._let_in and self._may_admit()
            if not self._let_in:
                running.wait(restores.scheduler.doze)
                restores.go_on()  # whose restore is over by now is admitted in this round
        elif self._saving.is_busy:
            self._let_save = not self._let_save or not any(True for _ in restores.scheduler.waiting())
            if self._let_save:
                restores.scheduler.doze(None)

    def _may_admit(self) -> bool:
        """Whether somebody in the queue need not wait for a restore."""
        return any(
            self._restores.may_be_admitted(request.rid) for request in self._restores.scheduler.waiting()
        )
