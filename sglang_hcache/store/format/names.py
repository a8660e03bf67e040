"""Names of the files in a store's directory, but for segments (docs/store-format.md, "Directories")."""

LOCK_NAME = "lock"
SUPERBLOCK_NAME = "superblock.json"
SUPERBLOCK_TMP_NAME = "superblock.tmp"
STATE_NAME = "state.json"
STATE_TMP_NAME = "state.tmp"
PROBE_NAME = "probe.tmp"
"""What a directory is tried with, and how fast it is read; a crash may leave one behind."""
OWN_NAMES = frozenset(
    {
        LOCK_NAME,
        SUPERBLOCK_NAME,
        SUPERBLOCK_TMP_NAME,
        STATE_NAME,
        STATE_TMP_NAME,
        PROBE_NAME,
    }
)
