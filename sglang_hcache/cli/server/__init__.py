"""SGLang's server: started (``hcache serve``, and by commands that need one), and asked."""
