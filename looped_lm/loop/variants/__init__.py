"""Components beyond those of the paper, one published variant per file."""
