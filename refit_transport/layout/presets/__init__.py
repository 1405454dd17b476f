"""Full-size manifests from a model's `config.json` and parallel sizes: no process, no weights. Pure."""
