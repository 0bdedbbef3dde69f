"""One file per command of `python -m fitting`: `add_arguments(parser)` and `run(options) -> exit status`."""
