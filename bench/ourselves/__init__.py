"""The service against itself: what HTTP, maps, a mixed load and time cost."""
