"""The stand-in for the CUDA driver, built for real."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hcache.cli.server import cpu_runtime
from sglang_hcache.cli.server.cpu_runtime import (
    LIBRARY,
    ensure_stub,
    has_gpu,
    usable_cores,
    variables_of_ranks,
)
from sglang_hcache.core.errors import ConfigError
from sglang_hcache.device import compiled

IS_OWN_GROUP = compiled._is_own_group


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_is_own_group", lambda _gid: False)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def test_stub_answers_no_device(cache_dir):
    folder = ensure_stub()
    assert folder.is_relative_to(cache_dir)
    assert [path.name for path in folder.iterdir()] == [LIBRARY]
    assert ctypes.CDLL(str(folder / LIBRARY)).cuPointerGetAttribute(None, 0, 0) == 100
    for path in (folder, folder / LIBRARY):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_stub_is_built_once(monkeypatch):
    built = ensure_stub() / LIBRARY
    before = built.stat()
    monkeypatch.setenv("PATH", "")
    assert ensure_stub() / LIBRARY == built
    assert built.stat() == before


def test_changed_source_is_built_anew(monkeypatch):
    first = ensure_stub()
    monkeypatch.setattr(cpu_runtime, "_STUB_SOURCE", cpu_runtime._STUB_SOURCE + "/* changed */\n")
    second = ensure_stub()
    assert second != first
    assert (second / LIBRARY).exists()


def test_servers_starting_together_share_one_stub():
    with ThreadPoolExecutor(4) as pool:
        folders = {future.result() for future in [pool.submit(ensure_stub) for _ in range(4)]}
    assert [path.name for path in folders.pop().iterdir()] == [LIBRARY]
    assert not folders


def test_missing_compiler_says_what_to_install(cache_dir, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"cc, gcc, clang.*apt-get install gcc"):
        ensure_stub()
    assert not [path for path in cache_dir.rglob("*") if path.is_file()]


def test_compiler_of_the_user_is_used(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(ConfigError, match="CC=no-such-compiler -m64"):
        ensure_stub()
    compiler = shutil.which("cc") or shutil.which("gcc")
    monkeypatch.setenv("CC", f"{compiler} -O1")
    assert (ensure_stub() / LIBRARY).exists()


def test_failing_compiler_leaves_nothing(cache_dir, monkeypatch):
    monkeypatch.setattr(cpu_runtime, "_STUB_SOURCE", "this is not C")
    with pytest.raises(ConfigError, match="the C compiler failed"):
        ensure_stub()
    assert not [path for path in cache_dir.rglob("*") if path.is_file()]


def test_cache_folder_that_is_a_file(cache_dir):
    cache_dir.write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        ensure_stub()


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch):
    """Called: from then on nothing can be made or changed, by root neither."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def mount() -> None:
        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr(Path, "chmod", refuse)

    return mount


def test_a_stub_that_was_built_for_everybody_is_used_where_nothing_can_be_written(read_only):
    built = ensure_stub()
    for path in (built / LIBRARY, built, built.parent):
        path.chmod(0o755)
    read_only()
    assert ensure_stub() == built


def test_the_folder_is_that_which_was_looked_at(monkeypatch, tmp_path, read_only):
    """A link could lead elsewhere before the server loads the library."""
    built = ensure_stub()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    read_only()
    assert ensure_stub() == built


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("place", ["library", "folder", "above"])
def test_a_stub_that_others_could_change_is_not_used(read_only, place, mode):
    built = ensure_stub()
    {"library": built / LIBRARY, "folder": built, "above": built.parent}[place].chmod(mode)
    read_only()
    with pytest.raises(ConfigError, match=r"cannot write .*: Read-only .*; XDG_CACHE_HOME can name another"):
        ensure_stub()


def test_others_may_have_files_beside_the_folder_but_not_in_it(read_only):
    built = ensure_stub()
    built.parent.chmod(0o1777)
    read_only()
    assert ensure_stub() == built
    os.chmod(built, 0o1777)
    with pytest.raises(ConfigError, match="cannot write"):
        ensure_stub()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
@pytest.mark.parametrize("place", ["library", "folder", "above"])
def test_a_stub_of_somebody_else_is_not_used(read_only, place):
    built = ensure_stub()
    os.chown({"library": built / LIBRARY, "folder": built, "above": built.parent}[place], 4711, -1)
    read_only()
    with pytest.raises(ConfigError, match="cannot write"):
        ensure_stub()


@pytest.fixture
def planted():
    """A library in the place of the stub, which is not the stub."""
    library = ensure_stub() / LIBRARY
    library.write_bytes(b"planted")
    return library


def assert_built_anew(library):
    assert ensure_stub() == library.parent
    assert library.read_bytes().startswith(b"\x7fELF")
    assert [path.name for path in library.parent.iterdir()] == [LIBRARY]
    for path in (library.parent, library):
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (0o700, os.geteuid())


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("place", ["library", "folder"])
def test_what_others_could_have_changed_is_built_anew(planted, place, mode):
    {"library": planted, "folder": planted.parent}[place].chmod(mode)
    assert_built_anew(planted)


def test_a_link_in_the_place_of_the_library_is_replaced(planted, tmp_path):
    planted.rename(tmp_path / "elsewhere")
    planted.symlink_to(tmp_path / "elsewhere")
    assert_built_anew(planted)
    assert (tmp_path / "elsewhere").read_bytes() == b"planted"


@needs_root
def test_a_library_of_somebody_else_is_built_anew(planted):
    os.chown(planted, 4711, -1)
    assert_built_anew(planted)


def test_servers_that_distrust_a_stub_together_build_it_anew(planted):
    planted.chmod(0o777)
    with ThreadPoolExecutor(4) as pool:
        folders = [future.result() for future in [pool.submit(ensure_stub) for _ in range(4)]]
    assert set(folders) == {planted.parent}
    assert_built_anew(planted)


@pytest.mark.parametrize("name", ["libc.so.6", "glibc-hwcaps"])
def test_something_else_in_the_folder_ends_the_start(name):
    """It is on the servers' ``LD_LIBRARY_PATH``: they would load that, too. It may be of when others could write."""
    folder = ensure_stub()
    (folder / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{folder} is not used, .* in it \({name}\): remove it"):
        ensure_stub()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_above_that_others_can_change_ends_the_start(planted, mode):
    planted.parents[1].chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"could change {planted.parents[1]}: .*chmod go-w.*XDG_CACHE_HOME"
    ):
        ensure_stub()


def test_a_group_that_is_the_users_alone_may_write(planted, monkeypatch):
    """As all folders are where each user has a group of that name, and the umask is 002."""
    monkeypatch.setattr(compiled, "_is_own_group", lambda gid: gid == planted.stat().st_gid)
    for path in (planted.parents[1], planted.parent, planted):
        path.chmod(0o775)
    ensure_stub()
    assert planted.read_bytes() == b"planted", "it was trusted"


@pytest.mark.parametrize(
    ("group", "is_own"),
    [
        (("me", 7, []), True),
        (("me", 7, ["me"]), True),
        (("me", 7, ["me", "you"]), False),
        (("staff", 7, []), False),
        (("me", 8, []), False),
        (None, False),
    ],
)
def test_whose_a_group_is(monkeypatch, group, is_own):
    def look_up(gid):
        if group is None:
            raise KeyError(gid)
        name, number, members = group
        return SimpleNamespace(gr_name=name, gr_gid=number, gr_mem=members)

    monkeypatch.setattr(compiled.pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_name="me", pw_gid=7))
    monkeypatch.setattr(compiled.grp, "getgrgid", look_up)
    assert IS_OWN_GROUP(7 if group is None else group[1]) == is_own


@needs_root
@pytest.mark.parametrize("place", ["folder", "above"])
def test_a_folder_of_somebody_else_ends_the_start(planted, place):
    other = {"folder": planted.parent, "above": planted.parents[1]}[place]
    os.chown(other, 4711, -1)
    with pytest.raises(ConfigError, match=rf"could change {other}: .*chown.*XDG_CACHE_HOME"):
        ensure_stub()


def test_folders_that_are_made_are_not_for_a_group_to_write(cache_dir):
    before = os.umask(0)
    try:
        library = ensure_stub() / LIBRARY
    finally:
        os.umask(before)
    made = [library, library.parent, library.parents[1], cache_dir]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o700, 0o755, 0o755]


def test_gpu_by_device_node(tmp_path):
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path, driver="libnone.so")


def test_no_gpu_by_control_node_alone(tmp_path):
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia0-caps").touch()
    assert not has_gpu(tmp_path, driver="libnone.so")


def test_our_stub_is_no_gpu(tmp_path):
    assert not has_gpu(tmp_path, driver=str(ensure_stub() / LIBRARY))


@pytest.mark.parametrize(("status", "devices", "expected"), [(0, 1, True), (0, 0, False), (100, 1, False)])
def test_gpu_by_driver(tmp_path, monkeypatch, status, devices, expected):
    source = (
        f"int cuInit(unsigned f) {{ (void)f; return {status}; }}\n"
        f"int cuDeviceGetCount(int *count) {{ *count = {devices}; return 0; }}\n"
    )
    monkeypatch.setattr(cpu_runtime, "_STUB_SOURCE", source)
    # ctypes finds a loaded library by its soname, so every case needs its own.
    options = (*cpu_runtime._COMPILER_OPTIONS[:-1], f"-Wl,-soname,libfake{status}{devices}.so")
    monkeypatch.setattr(cpu_runtime, "_COMPILER_OPTIONS", options)
    assert has_gpu(tmp_path, driver=str(ensure_stub() / LIBRARY)) is expected


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes the kernel's folder of CPUs, of (NUMA node, threads of its core) each; this process may use ``allowed``."""

    def build(cpus: dict[int, tuple[int, str]], allowed: set[int] | None = None) -> Path:
        for cpu, (node, siblings) in cpus.items():
            topology = tmp_path / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{siblings}\n")
            (tmp_path / f"cpu{cpu}" / f"node{node}").mkdir()
        usable = set(cpus) if allowed is None else allowed
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
        return tmp_path

    return build


def test_cores_are_counted_not_their_threads(machine):
    cpus = {cpu: (0, f"{cpu % 4},{cpu % 4 + 4}") for cpu in range(8)}
    assert usable_cores(machine(cpus)) == [0, 1, 2, 3]


def test_only_what_this_process_may_use(machine):
    cpus = {cpu: (0, f"{cpu % 4},{cpu % 4 + 4}") for cpu in range(8)}
    assert usable_cores(machine(cpus, {2, 5, 6})) == [2, 5]


def test_cores_of_a_node_stand_together(machine):
    """Also where the nodes' numbers alternate, and with more than ten of them."""
    cpus = {cpu: (10 - cpu % 2, str(cpu)) for cpu in range(6)}
    assert usable_cores(machine(cpus)) == [1, 3, 5, 0, 2, 4]


def test_every_cpu_is_a_core_where_the_kernel_tells_nothing(machine, tmp_path):
    machine({}, {1, 3})
    assert usable_cores(tmp_path / "nothing") == [1, 3]


def test_this_machine_has_cores():
    assert set(usable_cores()) <= os.sched_getaffinity(0)
    assert usable_cores()


@pytest.mark.parametrize(
    ("ranks", "cores", "bound"),
    [
        (2, [0, 1], "0|1"),
        (2, [0, 1, 4, 5], "0,1|4,5"),
        (2, [3, 4, 5], "3|4,5"),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], "0,1|2,3,4|5,6,7"),
        (2, [7], "7|7"),
        (5, [2, 3], "2|3|2|3|2"),
    ],
)
def test_ranks_share_the_cores(ranks, cores, bound):
    assert variables_of_ranks(ranks, cores) == {"SGLANG_CPU_OMP_THREADS_BIND": bound}


@pytest.mark.parametrize("ranks", [0, 1])
def test_one_rank_is_left_to_sglang(ranks):
    assert variables_of_ranks(ranks, [0, 1]) == {}


def test_sglang_takes_every_share(monkeypatch):
    """It wants as many as there are ranks, and gives each its own."""
    from sglang.srt.utils import numa_utils

    for name, value in variables_of_ranks(3, [0, 1, 2, 3]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(numa_utils, "get_cpu_ids_by_node", lambda: ["0,1,2,3"])
    shares = [numa_utils.init_threads_binding(tp_rank=rank, tp_size=3) for rank in range(3)]
    assert shares == ["0", "1", "2,3"]
