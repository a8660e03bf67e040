"""The server's main process, before anything is loaded: flags, refusals, and signals to stop."""
