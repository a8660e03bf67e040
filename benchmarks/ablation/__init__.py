"""What ``ablations.py`` measures: partitions, ways of saving, schedules."""
