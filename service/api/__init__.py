"""The native endpoints: each file has the request model, response and handler of one of them."""
