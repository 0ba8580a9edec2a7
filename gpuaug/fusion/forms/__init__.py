"""Targets: annotations that are transformed together with the images, such as masks, boxes, keypoints and labels."""
