"""Transport: connections and limits, request bodies, dispatch to endpoints, errors and OpenAPI."""
