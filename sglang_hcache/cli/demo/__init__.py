"""``hcache demo``: the comparison of two servers (``run``), or one server and the chat page (``chat``)."""
