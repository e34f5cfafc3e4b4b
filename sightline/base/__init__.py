"""The contract that all packages share: bundles, texts, errors, files, the machine."""
