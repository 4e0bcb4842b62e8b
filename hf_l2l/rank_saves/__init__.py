"""Checkpoints of several ranks: each writes what it updates, at once or while training goes on."""
