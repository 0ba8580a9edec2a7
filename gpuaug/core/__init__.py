"""Modules that all other folders use: batches, ragged images, lanes, errors, random numbers keyed by position."""
