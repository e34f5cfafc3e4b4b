"""The client for Python: one interface to a running service and to bundles in this process."""
