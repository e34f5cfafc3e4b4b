"""Evaluation of checkpoints: BLEU and chrF, accuracy, and how long a chat model keeps an instruction."""
