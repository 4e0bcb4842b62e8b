"""The estimate as users ask for it: of a model or its config, with options or the Trainer's arguments.

What a run takes is found in `plan`, of a model and an `L2LConfig`; here is what knows names, files, and arguments.
"""
