"""Transfer of batches from the wrapped loader's workers to the copy lane."""
