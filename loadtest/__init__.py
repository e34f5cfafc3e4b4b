"""Load test of a running service over HTTP; it imports nothing from the service."""
