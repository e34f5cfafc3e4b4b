"""Several worker processes that serve one port, and the supervisor that starts them."""
