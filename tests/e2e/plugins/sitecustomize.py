"""Python imports this in what the end-to-end tests start, before anything else.

Importing SGLang's seven thousand modules takes a core 12 s. With Python's own threshold, a seventh of that time goes
into looking for garbage where there is none, and another seventh into libraries that transformers imports because
they are there, for features that no test uses: assisted generation, torchao's quantisation. And each of a server's
three processes does it, for SGLang starts them anew ("spawn", which CUDA needs): forked, two of them have everything.
"""

import gc
import multiprocessing
import os
import sys

gc.set_threshold(100_000)
sys.modules.update(dict.fromkeys(("sklearn", "torchao")))  # None: not found
if "HCACHE_TEST_FORK" in os.environ:
    multiprocessing.set_start_method = lambda *_, **__: None
