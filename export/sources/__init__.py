"""Sources of models: files and folders that others wrote."""
