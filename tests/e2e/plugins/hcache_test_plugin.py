"""A second SGLang plugin, for the end-to-end tests only: looks into a real server, and damages it on demand.

It changes nothing until a file of a known name appears in the folder ``HCACHE_TEST_SWITCHES``:

* ``corrupt_restored_key``: K of every restored layer comes out wrong. Every equality test must notice. With a number in
  the file, on the rank of that number only.
* ``corrupt_recomputed``: layers that a restore recomputes see other tokens.
* ``keep_costs``: what restores and prefills take, and restores that do not start, change no predictions.
* ``always_restore``: whatever could be restored is, though recomputing may be predicted to be faster.
* ``slow_restore``: each layer of a restore takes ``_SLOW_S`` longer.
* ``slow_passes``: each pass of the model takes ``_SLOW_PASS_S`` longer, so that what decodes does so for seconds.
* ``hold_restore``: no layer of a restore is written before the switch is off.
* ``linger_restore``: restores stand still as long as it is on, but for those that are stopped.
* ``break_restore``: writing a layer raises an error that nobody foresees.
* ``fail_read``: taking a layer from a tier fails; with a number in the file, on that rank only.
* ``fail_adapter``: loading a LoRA adapter fails; with a number in the file, on that rank only.
* ``projector_positions``: hidden states are projected for other positions, also by the self-check at start.
* ``io_faults``, on before the start: the disk store's operations obey the switches below, each for the directory
  whose number its file holds, for all if it is empty. A directory that is out is tried again after ``_RETRY_S``.
  ``fail_reads``, ``fail_writes``: EIO. ``short_reads``: half of it comes. ``hang_reads``, ``hang_writes``: nothing
  ends before the switch is off; then it is really done, however late.

Restores get at least ``_PATIENCE_S`` before they are abandoned, and chunks ``_PATIENCE_FOR_SLOTS_S`` to find room in
host memory, for the machine may be busy with something else.
``HCACHE_TEST_TORCHAO`` gives torchao the names that SGLang 0.5.17 imports: what it pins has only their successors.
It hooks ``ModelRunner.forward`` and a method of weight updates when it is loaded, as plugins for timings do.
At start, ``code-<pid>.json`` names SGLang's package and the functions that are hooked in each process.
When a request whose id begins with ``probe-`` finishes, K and V of its prompt are saved as ``<rid>.pt``.
"""

import errno
import json
import os
import threading
import time
from pathlib import Path

_SLOW_S = 0.15
_SLOW_PASS_S = 0.05
_PATIENCE_S = 30.0
_PATIENCE_FOR_SLOTS_S = 5.0
_RETRY_S = 1.0
_LET_GO_S = 0.05
_TORCHAO = {
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "int4_weight_only": "Int4WeightOnlyConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight": "Float8DynamicActivationFloat8WeightConfig",
}
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register():
    folder = os.environ.get("HCACHE_TEST_SWITCHES")
    if folder is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "HCACHE_TEST_TORCHAO" in os.environ:
        _name_torchao_as_sglang_does()
    switches = Path(folder)
    # After SGLang has installed the tier's own hooks, which import the classes that are patched here.
    HookRegistry.register(
        "sglang.srt.managers.scheduler.publish", lambda *_, **__: _look_and_patch(switches), HookType.AFTER
    )

    def perhaps_slowly(forward, *args, **kwargs):
        if (switches / "slow_passes").exists():
            time.sleep(_SLOW_PASS_S)
        return forward(*args, **kwargs)

    for name, hook in (
        ("model_executor.model_runner.ModelRunner.forward", perhaps_slowly),
        (f"{_UPDATER}.update_weights_from_disk", lambda original, *a, **k: original(*a, **k)),
    ):
        HookRegistry.register(f"sglang.srt.{name}", hook, HookType.AROUND)


def _name_torchao_as_sglang_does():
    from torchao import quantization

    for name, successor in _TORCHAO.items():
        setattr(quantization, name, getattr(quantization, successor))


def _look_and_patch(switches):
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    code = {"sglang": sglang.__file__, "hooks": sorted(HookRegistry._patched)}
    (switches / f"code-{os.getpid()}.json").write_text(json.dumps(code))
    _patch(switches)


def _patch(switches):
    import sys

    compat = sys.modules.get("sglang_hcache.sglang_plugin.compat.v0_5_17.cache")
    if compat is None or hasattr(compat, "patched_by_tests"):  # off, or SGLang published a second time
        return
    compat.patched_by_tests = True
    _patch_restorer(switches)
    _patch_reads(switches)
    _patch_recomputation(switches)
    _patch_adapters(switches)
    _be_patient()
    _patch_learning(switches)
    if (switches / "io_faults").exists():
        _patch_engine(switches)
    _patch_projector(switches)
    _patch_cache(compat.HCacheRadixCache, switches)


def _is_on_here(switch):
    """Whether it is on for this rank."""
    from torch import distributed

    try:
        return switch.read_text() in ("", f"{distributed.get_rank()}")
    except FileNotFoundError:
        return False


def _patch_restorer(switches):
    from sglang_hcache.restore.methods import LayerRestorer

    write = LayerRestorer._write_from

    def damaged(self, stored, places, positions, slots):
        if (switches / "slow_restore").exists():
            time.sleep(_SLOW_S)
        while (switches / "hold_restore").exists():
            time.sleep(_LET_GO_S)
        if (switches / "break_restore").exists():
            raise RuntimeError("injected by a test")
        write(self, stored, places, positions, slots)
        if _is_on_here(switches / "corrupt_restored_key"):
            key, value = self.pool.read(stored.layer, slots)
            factor = 1.05 if key.dtype.itemsize > 1 else 1.5  # FP8 would round less away
            self.pool.write(stored.layer, slots, (key.float() * factor).to(key.dtype), value)

    start = LayerRestorer.start

    def lingering(self, stored, positions, slots, before_layer=lambda: None):
        while (switches / "linger_restore").exists():
            before_layer()
            time.sleep(_LET_GO_S)
        return start(self, stored, positions, slots, before_layer)

    LayerRestorer._write_from = damaged
    LayerRestorer.start = lingering


def _patch_recomputation(switches):
    from sglang_hcache.sglang_plugin.compat.v0_5_17.forward import ForwardOf

    extend = ForwardOf.extend

    def damaged(self, tokens, *rest):
        return extend(self, tokens[::-1] if (switches / "corrupt_recomputed").exists() else tokens, *rest)

    ForwardOf.extend = damaged


def _patch_adapters(switches):
    from sglang.srt.lora.lora_manager import LoRAManager

    load = LoRAManager.load_lora_weights

    def load_or_fail(self, lora_ref):
        if _is_on_here(switches / "fail_adapter"):
            raise OSError("injected by a test")
        load(self, lora_ref)

    LoRAManager.load_lora_weights = load_or_fail


def _be_patient():
    """With a machine that has much else to do."""
    from sglang_hcache.restore import decision
    from sglang_hcache.tier import demoter

    decision._LEAST_PATIENCE_S = _PATIENCE_S
    demoter._WAIT_FOR_SLOT_S = _PATIENCE_FOR_SLOTS_S


def _patch_learning(switches):
    from sglang_hcache.restore.decision import Decision
    from sglang_hcache.restore.gate import RestoreGate

    def unless_kept(learn):
        def patched(self, *observation, **more):
            return None if (switches / "keep_costs").exists() else learn(self, *observation, **more)

        return patched

    for name in ("restored", "prefilled", "is_due"):
        setattr(RestoreGate, name, unless_kept(getattr(RestoreGate, name)))

    pays = Decision.pays

    def always(self, *of_what):
        return pays(self, *of_what) or (switches / "always_restore").exists()

    Decision.pays = always


def _patch_reads(switches):
    from sglang_hcache.core.errors import StoreIOError
    from sglang_hcache.tier.tiered import TieredStore

    def damaged(read):
        def read_or_fail(self, lease, layers):
            asked = (layers,) if isinstance(layers, int) else layers
            if 1 in asked and _is_on_here(switches / "fail_read"):
                raise StoreIOError("injected by a test")
            return read(self, lease, layers)

        return read_or_fail

    for name in ("read_layers", "rows_in_place"):
        setattr(TieredStore, name, damaged(getattr(TieredStore, name)))


def _patch_engine(switches):
    from sglang_hcache.store.io.engine import IOKind
    from sglang_hcache.store.store import DiskStore
    from sglang_hcache.store.volumes import health
    from sglang_hcache.testing.io_faults import Fault, FaultEngine, HangingEngine

    health._LONGEST_RETRY_S = _RETRY_S
    create = DiskStore.__init__

    def is_on(name, op):
        try:
            return (switches / name).read_text() in ("", str(op.stripe))
        except FileNotFoundError:
            return False

    def decide(op, _):
        if op.kind is not IOKind.READ:
            return Fault(errno.EIO) if is_on("fail_writes", op) else None
        if is_on("fail_reads", op):
            return Fault(errno.EIO)
        return Fault(share_done=0.5) if is_on("short_reads", op) else None

    def hangs(op):
        return is_on("hang_reads" if op.kind is IOKind.READ else "hang_writes", op)

    def let_go(engine):
        while True:
            time.sleep(_LET_GO_S)
            if not ((switches / "hang_reads").exists() or (switches / "hang_writes").exists()):
                engine.let_go()
                engine.hangs = hangs

    def with_faults(self, config, volumes, engine, *rest):
        hanging = HangingEngine(engine, hangs)
        threading.Thread(target=let_go, args=(hanging,), daemon=True).start()
        create(self, config, volumes, FaultEngine(hanging, decide), *rest)

    DiskStore.__init__ = with_faults


def _patch_projector(switches):
    from sglang_hcache.core.layout import Method
    from sglang_hcache.restore.methods import LayerRestorer

    write = LayerRestorer._write_from

    def at_wrong_positions(self, stored, places, positions, slots):
        shift = stored.method is Method.HIDDEN and (switches / "projector_positions").exists()
        write(self, stored, places, positions + int(shift), slots)

    LayerRestorer._write_from = at_wrong_positions


def _patch_cache(cache, switches):
    import torch

    finished = cache.cache_finished_req

    def probing(self, req, is_insert=True, *, kv_len_to_handle):
        if req.rid.startswith("probe-"):
            slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(req.origin_input_ids)].long()
            pool = self.token_to_kv_pool_allocator.get_kvcache()
            state = {
                "k": torch.stack([layer[slots] for layer in pool.k_buffer]),
                "v": torch.stack([layer[slots] for layer in pool.v_buffer]),
            }
            part = switches / f"{req.rid}.part"
            torch.save(state, part)
            part.rename(switches / f"{req.rid}.pt")
        finished(self, req, is_insert, kv_len_to_handle=kv_len_to_handle)

    cache.cache_finished_req = probing
