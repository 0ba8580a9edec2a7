"""Training frameworks that know a loader by more than its batches. Each file speaks to one, and imports it when it is used."""
