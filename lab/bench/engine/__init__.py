"""Measure the service alone: attention maps, a mixed load, memory and start-up."""
