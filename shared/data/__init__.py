"""Where samples come from, and in which order: data sets, sampling, loading, augmentation."""
