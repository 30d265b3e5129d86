"""Training of small models: corpora, batches, losses, optimizers and the trainer."""
