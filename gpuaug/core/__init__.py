"""Shared by all rooms: batches, ragged images, lanes, errors, random numbers by position."""
