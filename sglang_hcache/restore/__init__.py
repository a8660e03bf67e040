"""The load path: one request's chunks become K and V in device slots [HCache §3.1, §4.1].

``gate`` says whether a prefix comes back and how, ``job`` is one restore and its life, ``pipeline`` reads and
projects layer by layer, ``engine`` runs jobs on threads of its own. What becomes of ``rows`` is in ``methods``;
``lanes`` does it on a CPU, ``stage`` on a GPU.
"""
