"""Commands with their own code, one module each; see `looped_lm.cli`."""
