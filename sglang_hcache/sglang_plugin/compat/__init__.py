"""SGLang's classes, subclassed: one folder per release."""
