"""The stand-in for the CUDA driver, built for real."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hcache.cli.server import cpu_runtime
from sglang_hcache.cli.server.cpu_runtime import LIBRARY, ensure_stub, has_gpu, stub_dir
from sglang_hcache.core.errors import ConfigError


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache"


def test_stub_answers_no_device(cache_dir):
    folder = ensure_stub()
    assert folder == stub_dir()
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


def test_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"cc, gcc, clang.*apt-get install gcc"):
        ensure_stub()
    assert list(stub_dir().iterdir()) == []


def test_compiler_of_the_user_is_used(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(ConfigError, match="CC=no-such-compiler -m64"):
        ensure_stub()
    compiler = shutil.which("cc") or shutil.which("gcc")
    monkeypatch.setenv("CC", f"{compiler} -O1")
    assert (ensure_stub() / LIBRARY).exists()


def test_failing_compiler_leaves_nothing(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "_STUB_SOURCE", "this is not C")
    with pytest.raises(ConfigError, match="the C compiler failed"):
        ensure_stub()
    assert list(stub_dir().iterdir()) == []


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["library", "folder", "above"])
def test_a_stub_of_somebody_else_is_not_used(read_only, place):
    built = ensure_stub()
    os.chown({"library": built / LIBRARY, "folder": built, "above": built.parent}[place], 4711, -1)
    read_only()
    with pytest.raises(ConfigError, match="cannot write"):
        ensure_stub()


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
