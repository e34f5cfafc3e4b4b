"""Training: the trainer, the tasks that it trains and their losses."""
