"""A run on disk: its folder, its checkpoints, its rows, and how a signal ends it. Knows no model."""
