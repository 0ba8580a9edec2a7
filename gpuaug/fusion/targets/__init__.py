"""Targets that follow the images: masks, boxes, keypoints, labels, target dicts."""
