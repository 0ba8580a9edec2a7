"""From the wrapped loader's workers to the copy lane."""
