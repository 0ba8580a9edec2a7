"""What every room uses: batches, ragged images, lanes, errors, random numbers by position."""
