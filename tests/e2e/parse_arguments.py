"""Run by test_flags.py in a process of its own: parse command lines as the real server does, print what came out."""

import contextlib
import io
import json
import os
import sys
from itertools import takewhile
from unittest.mock import patch

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402


def parse(line: list[str]) -> dict[str, object]:
    """``line`` as the command ``env`` has it."""
    variables = list(takewhile(lambda word: not word.startswith("-"), line))
    environment = dict(variable.split("=", 1) for variable in variables)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), patch.dict(os.environ, environment):
        try:
            parsed = prepare_server_args(line[len(variables) :])
        except SystemExit as stop:
            return {"exit": stop.code, "stderr": errors.getvalue()}
        except Exception as error:
            return {"exit": "exception", "stderr": repr(error)}
    assert isinstance(parsed, ServerArgs)
    names = (
        "radix_cache_backend",
        "enable_hierarchical_cache",
        "hicache_storage_backend",
        "hicache_storage_backend_extra_config",
    )
    fields = {name: getattr(parsed, name) for name in names}
    share = parsed.mem_fraction_static
    return {"exit": None, "stderr": errors.getvalue(), "fields": fields, "pool_share": share}


print("RESULTS " + json.dumps([parse(arguments) for arguments in json.load(sys.stdin)]))
