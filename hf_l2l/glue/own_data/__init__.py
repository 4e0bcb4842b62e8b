"""What own data has to tell: in which columns texts and labels are, and whether labels are classes or numbers.

Where rows come from, and what becomes of them, is in `hf_l2l.glue.data`. Nothing here imports the package datasets.
"""
