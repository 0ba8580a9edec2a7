"""Clips of videos: chosen and packed by workers, decoded by a ``DecodeStage``."""
