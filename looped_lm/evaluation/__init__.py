"""What a trained model can do: loss over recurrences, synthetic probes, public tasks."""
