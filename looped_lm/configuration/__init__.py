"""From YAML and command line to objects: config files, the parser, and how a command runs and ends."""
