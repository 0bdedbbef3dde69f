"""Scaling laws of looped language models, fitted from run records: numpy and scipy only, never torch."""
