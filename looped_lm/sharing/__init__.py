"""Models in and out: exported folders, checkpoints, and the public reference's format."""
