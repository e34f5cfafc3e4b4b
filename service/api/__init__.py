"""The native endpoints: each file has the request model, the response and the handler of one
endpoint.
"""
