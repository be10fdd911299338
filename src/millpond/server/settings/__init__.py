"""Settings: options from the command line, the environment and a YAML file."""
