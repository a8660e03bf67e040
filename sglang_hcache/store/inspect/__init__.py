"""Looking at a store and mending it, beside a server or without one: what ``hcache store`` does."""
