"""The axes of research: what a loop is made of, one seam per file, and nothing but torch."""
