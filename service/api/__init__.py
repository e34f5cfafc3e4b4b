"""Endpoints about the service and its models, and the parts that endpoints share."""
