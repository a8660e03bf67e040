"""SGLang's classes, subclassed: one file per release."""
