"""What ``store_io.py`` measures: fio, the I/O engines and the disk store under the same loads."""
