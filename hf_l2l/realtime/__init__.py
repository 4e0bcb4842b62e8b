"""Real-time checkpoints (arXiv:2106.02679, section 8.2): generations of the training's state that are written while it
goes on, so that a program that ends at any moment loses the steps since the last whole one."""
