"""Python imports this in what the end-to-end tests start, before anything else.

Each of a server's three processes imports SGLang's seven thousand modules. With Python's own threshold, a seventh of
that time goes into looking for garbage where there is none.
"""

import gc

gc.set_threshold(100_000)
