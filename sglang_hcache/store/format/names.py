"""Names of the files in a store's directory, but for segments (docs/store-format.md, "Directories")."""

LOCK_NAME = "lock"
SUPERBLOCK_NAME = "superblock.json"
SUPERBLOCK_TMP_NAME = "superblock.tmp"
INDEX_NAME = "index.sqlite"
INDEX_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""What is appended to it in the names of its files."""
PROBE_NAME = "probe.tmp"
"""What a directory is tried with, and how fast it is read; a crash may leave one behind."""
