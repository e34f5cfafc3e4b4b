"""Transport: connections and their limits, request bodies, dispatch to endpoints, errors and
OpenAPI.
"""
