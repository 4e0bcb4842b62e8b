"""Folders of checkpoints: written beside, put in place as a whole, and checked before anything of them is loaded;
while training goes on, if asked.
"""
