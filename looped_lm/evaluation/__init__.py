"""Measuring a trained model: loss over recurrences, synthetic probes, public tasks. See `commands/evaluate.py`."""
