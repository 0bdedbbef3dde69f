"""Errors, wording and writing of files: what knows no model and imports nothing heavy."""
