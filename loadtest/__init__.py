"""Loads a running service over HTTP and reports what its clients see. It imports nothing of the service."""
