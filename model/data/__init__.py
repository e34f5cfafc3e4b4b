"""Data: reading text, generating dialogues, tokenizing and batching."""
