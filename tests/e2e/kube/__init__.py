"""A real API server of Kubernetes for tests, built of Debian's sources."""
