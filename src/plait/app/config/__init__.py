"""The configuration: typed sections, read from TOML and the command line."""
