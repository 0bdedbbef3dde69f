"""What a fit says, in one wording everywhere: sections, figures and report folders."""
