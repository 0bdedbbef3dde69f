"""From YAML and command line to objects: config files, the parser, and its hints."""
