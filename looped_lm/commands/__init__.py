"""Commands with code of their own, a module each; see `looped_lm.cli`."""
