"""What is done to a batch on the device: copy, transform, frozen encoder."""
