"""What follows the images: masks, boxes, keypoints, labels, target dicts."""
