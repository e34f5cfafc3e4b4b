"""Data: reading text, generating dialogues, the tokenizer and padded batches."""
