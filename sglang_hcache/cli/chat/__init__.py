"""``hcache chat``: a page for several conversations with a running server.

| module | what it is |
|---|---|
| ``command`` | the command: options, port, errors |
| ``conversation`` | what was said, and how far each answer is; no I/O |
| ``watch`` | looks at the server as long as somebody looks at the page |
| ``session`` | one browser's conversations, and the answers on their way |
| ``figures`` | bars, strips and tables as HTML |
| ``page/`` | the page, and what serves it until Ctrl-C; nothing else needs NiceGUI |
"""
