"""A PromQL evaluator over samples in memory."""
