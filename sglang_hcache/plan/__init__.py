"""Which layer comes back by which method, and how long that takes: costs, profiles, timelines, plans.

Numbers in, numbers out: nothing here reads a file, a clock or a device. ``docs/planner.md`` explains the method.
"""
