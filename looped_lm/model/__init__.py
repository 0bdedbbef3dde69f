"""From tokens to loss: the transformer, its layers, and what they cost."""
