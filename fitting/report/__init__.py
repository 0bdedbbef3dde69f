"""One way to say what a fit says: sections, figures and report folders."""
