"""The use cases, without HTTP: each checks a request against a model's limits, runs it, and returns its result."""
