"""Folders of checkpoints: written beside, put in place as a whole, and checked before anything of them is loaded.

Nothing here knows what a checkpoint is of.
"""
