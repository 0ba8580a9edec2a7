"""Work on a batch on the device: copy, transform, frozen encoder."""
