"""Measure a service under more load than it can serve, for docs/explanation/reliability.md."""
