"""The YAML schema and its rules."""
