"""What a loop is made of: one axis of research per file, without Lightning."""
