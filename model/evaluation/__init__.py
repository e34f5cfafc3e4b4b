"""Evaluation of checkpoints: BLEU and chrF, accuracy, and recall of instructions by chat models."""
