"""One small file for each family of endpoints."""
