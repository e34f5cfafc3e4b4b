"""Measure the service against its own engine: the cost of HTTP and attention maps, batching, memory
and start-up.
"""
