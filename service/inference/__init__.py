"""Use cases, independent of HTTP: each validates a request, runs it and returns its result."""
