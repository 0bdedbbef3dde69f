"""The laws that a fit may take."""
