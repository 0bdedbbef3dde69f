"""Scripts that measure error rates and coverage on simulated grids; fitting/README.md has their tables."""
