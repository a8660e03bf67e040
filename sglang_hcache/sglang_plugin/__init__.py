"""Everything that touches SGLang, which calls ``entry`` in each of its processes and ``hooks`` in the scheduler's.

Each folder may import those behind it: ``compat`` (SGLang's classes, subclassed: one folder per release), ``launch``
(the main process, before anything is loaded), ``setup`` (the scheduler's process, before it serves), ``serving`` (each
round of the scheduler), ``seam`` (what all of them know of SGLang).
"""
