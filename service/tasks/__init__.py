"""The operations: each file has the body, result, function and endpoint of one of them."""
