"""Runs as a table: loading records and CSV files, and the splits of their parameters."""
