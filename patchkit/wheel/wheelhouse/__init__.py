"""Keep the folder of finished wheels: contents, manifest, signature, checks; fill it by uv."""
