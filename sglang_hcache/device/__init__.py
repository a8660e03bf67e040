"""Host memory for the device, and projectors: hidden states to K and V."""
