"""Errors, wording and file writing: code that knows nothing about models and imports nothing heavy."""
