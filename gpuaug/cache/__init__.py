"""``FeatureCache``: what the stages of a loader compute in the first epochs, stored in files for all later epochs."""
