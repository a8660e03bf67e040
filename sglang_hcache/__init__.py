"""sglang-hcache: a hidden-state tier below SGLang's radix prefix cache."""

__version__ = "0.1.0"
