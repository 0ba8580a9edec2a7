"""From encoded images to a batch of pixels on the device."""
