"""Run by ``../test_triton_rows.py`` in a process of their own: Triton asks for its interpreter when it is imported."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
