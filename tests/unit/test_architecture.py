"""CONTRIBUTING's rules, read from the source: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sglang_hcache"

OURS = {
    "core": set(),
    "plan": {"core"},
    "store": {"core"},
    "tier": {"core", "store"},
    "device": {"core"},
    "capture": {"core", "tier", "device"},
    "restore": {"core", "plan", "tier", "device"},
    "sglang_plugin": {"core", "plan", "store", "tier", "device", "capture", "restore"},
    "cli": {"core", "plan", "store", "device", "restore", "sglang_plugin"},
    "testing": {"core", "store"},
}
"""Folder -> our folders that it may import, besides itself."""

# numpy carries bytes from the tier through capture, restore and device; xxhash makes the store's digests.
OTHERS = {
    "core": {"pydantic"},
    "plan": {"numpy", "pydantic"},
    "store": {"numpy", "pydantic", "xxhash", "nixl"},
    "tier": {"numpy"},
    "device": {"numpy", "torch", "triton"},
    "capture": {"numpy", "torch"},
    "restore": {"numpy", "torch"},
    "sglang_plugin": {"numpy", "torch", "sglang", "yaml", "prometheus_client"},
    "cli": {
        *("torch", "typer", "rich", "yaml", "psutil", "httpx"),
        *("transformers", "tokenizers", "safetensors", "matplotlib", "nicegui"),
        *("markdown_it", "pygments", "starlette"),
    },
    "testing": {"numpy", "xxhash"},
}
"""Folder -> distributions that it may import, besides the standard library."""

PLUGIN = ["seam", "serving", "setup", "launch", "compat", ""]
"""Folders of the plugin, the last one its own: each may import those before it."""

PURE = ("core", "plan", "store", "tier")

MAX_FILE_LINES = 400
MAX_FILE_LINES_WITH_REASON = 600
MAX_CLASS_LINES = 300
MAX_FUNCTION_LINES = 60
LONG_FILES: dict[str, str] = {}
"""Files past 400 lines -> why. May only shrink."""

ENVIRONMENT_READERS = {"core/config.py"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv", "unsetenv"}
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
    *("add", "discard", "update", "setdefault", "popitem", "appendleft", "popleft"),
}
CONSTANT_NAME = re.compile(r"_{0,2}[A-Z][A-Za-z0-9_]*|__\w+__")
MODULE_OBJECTS = {"logger", "app"}
"""Lower-case module names that are not state: the module's logger and the command-line application."""


@dataclass(frozen=True)
class Source:
    name: str
    """Path inside the package, with forward slashes."""
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else ""

    @property
    def module(self) -> str:
        return "sglang_hcache." + self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @classmethod
    def parse(cls, name: str, text: str) -> Source:
        return cls(name, text, ast.parse(text, name))


def _sources() -> list[Source]:
    return [
        Source.parse(path.relative_to(PACKAGE).as_posix(), path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


SOURCES = _sources()


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also inside functions; relative ones made absolute."""
    package = ["sglang_hcache", *source.name.split("/")[:-1]]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def import_violations(source: Source) -> list[str]:
    found = []
    for line, module in imported_modules(source):
        root, _, rest = module.partition(".")
        if root == "sglang_hcache":
            # `import sglang_hcache` and its top-level names (the version) are for everyone.
            target = rest.split(".")[0]
            allowed = target not in OURS or target in OURS[source.folder] | {source.folder}
        else:
            allowed = root in sys.stdlib_module_names or root in OTHERS[source.folder]
        if not allowed:
            found.append(f"{source.name}:{line} imports {module}")
    return found


def plugin_violations(source: Source) -> list[str]:
    if source.folder != "sglang_plugin":
        return []
    return [
        f"{source.name}:{line} imports {module}"
        for line, module in imported_modules(source)
        if module.startswith("sglang_hcache.sglang_plugin.")
        if _plugin_rank(module) > _plugin_rank(source.module)
    ]


def _plugin_rank(module: str) -> int:
    """How high in ``PLUGIN`` the folder of a module of the plugin stands."""
    folder = [*module.split("."), ""][2]
    return PLUGIN.index(folder if folder in PLUGIN else "")


def cuda_violations(source: Source) -> list[str]:
    if source.folder == "device":
        return []
    found = [
        f"{source.name}:{line} imports {module}"
        for line, module in imported_modules(source)
        if module.startswith("torch.cuda")
    ]
    found += [
        f"{source.name}:{node.lineno} uses torch.cuda"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "cuda"
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    return found


def environment_violations(source: Source) -> list[str]:
    if source.name in ENVIRONMENT_READERS:
        return []
    found = [
        f"{source.name}:{line} imports {module}"
        for line, module in imported_modules(source)
        if module.removeprefix("os.") in ENVIRONMENT_NAMES
    ]
    found += [
        f"{source.name}:{node.lineno} uses os.{node.attr}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES
        if isinstance(node.value, ast.Name) and node.value.id == "os"
    ]
    return found


def _root_name(node: ast.expr) -> str | None:
    """``NAMES`` of ``NAMES[0].field``."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _changed_expressions(tree: ast.Module) -> Iterator[ast.expr]:
    """What is changed in place: by item assignment, deletion or a mutating method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            yield from (target for target in node.targets if isinstance(target, ast.Subscript))
        elif isinstance(node, ast.AugAssign):
            yield node.target
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS
        ):
            yield node.func.value


def state_violations(source: Source) -> list[str]:
    found = [
        f"{source.name}:{node.lineno} has a global statement"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    module_names = set()
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else targets
        for name in (
            leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)
        ):
            module_names.add(name)
            if name not in MODULE_OBJECTS and not CONSTANT_NAME.fullmatch(name):
                found.append(f"{source.name}:{node.lineno} assigns the module variable {name}")
    constants = {name for name in module_names if re.fullmatch(r"_*[A-Z][A-Z0-9_]*", name)}
    found += [
        f"{source.name}:{node.lineno} changes the constant {_root_name(node)}"
        for node in _changed_expressions(source.tree)
        if _root_name(node) in constants
    ]
    return found


def subclass_violations(source: Source) -> list[str]:
    """Classes of SGLang are subclassed in one file per release only."""
    if source.name.startswith("sglang_plugin/compat/"):
        return []
    foreign = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").split(".")[0] == "sglang"
    }
    return [
        f"{source.name}:{node.lineno} subclasses {ast.unparse(base)}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if _root_name(base) in foreign
    ]


def length_violations(source: Source) -> list[str]:
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            limit = MAX_CLASS_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = MAX_FUNCTION_LINES
        else:
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > limit:
            found.append(f"{source.name}:{node.lineno} {node.name} has {lines} lines, at most {limit}")
    lines = len(source.text.splitlines())
    limit = MAX_FILE_LINES_WITH_REASON if source.name in LONG_FILES else MAX_FILE_LINES
    if lines > limit:
        found.append(f"{source.name} has {lines} lines, at most {limit}")
    return found


RULES = [
    import_violations,
    plugin_violations,
    cuda_violations,
    environment_violations,
    state_violations,
    subclass_violations,
    length_violations,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_rule(rule):
    violations = [text for source in SOURCES if source.folder in OURS for text in rule(source)]
    assert not violations, "\n" + "\n".join(violations)


def test_nothing_is_allowed_that_nobody_needs():
    for folder in OURS:
        modules = {
            module for source in SOURCES if source.folder == folder for _, module in imported_modules(source)
        }
        ours = {module.split(".")[1] for module in modules if module.startswith("sglang_hcache.")}
        assert not OURS[folder] - ours, folder
        assert not OTHERS[folder] - {module.split(".")[0] for module in modules}, folder


def test_every_folder_has_a_row_in_the_table():
    assert {source.folder for source in SOURCES} <= {"", *OURS}
    inside = {source.name.split("/")[1] for source in SOURCES if source.folder == "sglang_plugin"}
    assert {name for name in inside if not name.endswith(".py")} == set(PLUGIN) - {""}


def test_no_module_imports_itself_through_others():
    """Counting imports inside functions and for types only."""
    modules = {source.module for source in SOURCES}
    imports = {
        source.module: {
            found if found in modules else found.rpartition(".")[0] for _, found in imported_modules(source)
        }
        & modules
        for source in SOURCES
    }
    list(TopologicalSorter(imports).static_order())  # CycleError names them


def test_every_foreign_import_is_a_declared_dependency():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    requirements = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    declared = {re.split(r"[<>=\[; ]", text)[0].lower() for text in requirements}
    distribution = {
        "yaml": "pyyaml",
        "prometheus_client": "prometheus-client",
        "markdown_it": "markdown-it-py",
    }
    roots = {module.split(".")[0] for source in SOURCES for _, module in imported_modules(source)}
    foreign = roots - sys.stdlib_module_names - {"sglang_hcache", "nixl"}  # nixl: optional
    assert {distribution.get(root, root) for root in foreign} <= declared


def test_long_files_list_only_shrinks():
    long_files = {source.name for source in SOURCES if len(source.text.splitlines()) > MAX_FILE_LINES}
    assert not LONG_FILES.keys() - long_files, "no longer long: take them out of LONG_FILES"


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (import_violations, "core/a.py", "import torch"),
        (import_violations, "core/a.py", "def f():\n    from sglang.srt import server_args"),
        (import_violations, "store/a.py", "from sglang_hcache.tier.chunk import Chunk"),
        (import_violations, "store/a.py", "from ..tier import chunk"),
        (import_violations, "capture/a.py", "from sglang_hcache import restore"),
        (import_violations, "cli/a.py", "import sglang"),
        (plugin_violations, "sglang_plugin/seam/a.py", "from sglang_hcache.sglang_plugin import serving"),
        (
            plugin_violations,
            "sglang_plugin/serving/a.py",
            "from sglang_hcache.sglang_plugin.setup import scratch",
        ),
        (plugin_violations, "sglang_plugin/launch/a.py", "from ..compat.v0_5_17 import cpu"),
        (plugin_violations, "sglang_plugin/compat/a.py", "from sglang_hcache.sglang_plugin import hooks"),
        (cuda_violations, "restore/a.py", "import torch\ntorch.cuda.synchronize()"),
        (cuda_violations, "capture/a.py", "from torch import cuda"),
        (environment_violations, "cli/a.py", "import os\nos.environ['A'] = '1'"),
        (environment_violations, "tier/a.py", "from os import getenv"),
        (state_violations, "core/a.py", "def f():\n    global x"),
        (state_violations, "core/a.py", "cache = {}"),
        (state_violations, "core/a.py", "_CACHE: dict = {}\ndef f():\n    _CACHE['a'] = 1"),
        (state_violations, "core/a.py", "SEEN = set()\ndef f():\n    SEEN.add(1)"),
        (subclass_violations, "sglang_plugin/a.py", "from sglang.x import R\nclass A(R): pass"),
        (length_violations, "core/a.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (length_violations, "core/a.py", "\n" * (MAX_FILE_LINES + 1)),
    ],
)
def test_rule_catches(rule, name, text):
    assert rule(Source.parse(name, text))


def test_pure_layers_import_without_torch_and_sglang():
    modules = [source.module for source in SOURCES if source.folder in PURE]
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['sglang'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
