"""From runs and a law to a fit, with what makes it doubtful and its intervals."""
