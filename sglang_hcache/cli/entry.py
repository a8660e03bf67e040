"""What the script ``hcache`` calls. Imports next to nothing, so that it comes before all that takes long."""

from __future__ import annotations

from sglang_hcache.cli.signals import ended_by_interrupts


def main() -> None:
    """Run the command."""
    with ended_by_interrupts():
        from sglang_hcache.cli.main import main as run_command
    run_command()
