"""What `run_glue_l2l.py` says for people: its `--help`, option names as typed, sizes, last words.

Errors themselves, the log and the exit codes are in `hf_l2l.glue.messages`.
"""
