"""Sweeps: many runs from one file, planned, launched, resumed and collected. `python -m looped_lm sweep --help`."""
