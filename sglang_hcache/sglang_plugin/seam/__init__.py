"""What the rest of the plugin knows of SGLang: its model, device and memory, and how its functions are hooked."""
