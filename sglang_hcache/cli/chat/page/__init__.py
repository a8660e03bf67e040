"""The page of ``hcache chat``. What is here, and nothing else, needs the extra ``chat``."""
