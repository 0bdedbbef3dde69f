"""Common ground: errors, wording and writing of files. Knows no model and imports nothing heavy."""
