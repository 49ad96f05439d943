"""One TOML file, typed and validated."""
