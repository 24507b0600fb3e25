"""Keep the folder of finished wheels: contents, manifest, checks; fill it with dependencies."""
