"""Python imports this in what the end-to-end tests start, before anything else.

Each of a server's three processes imports SGLang's seven thousand modules. With Python's own threshold, a seventh of
that time goes into looking for garbage where there is none, and another seventh into libraries that transformers
imports because they are there, for features that no test uses: assisted generation, torchao's quantisation.
"""

import gc
import sys

gc.set_threshold(100_000)
sys.modules.update(dict.fromkeys(("sklearn", "torchao")))  # None: not found
