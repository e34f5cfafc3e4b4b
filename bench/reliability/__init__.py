"""Behaviour of a service under more load than it can serve, measured for docs/reliability.md."""
