"""The processes (ranks) of one host that train one model together: their sockets, their shared memory, who owns what.

Nothing here knows of layers, gradients or updates; what the EPS does with several ranks is in `shared_eps`.
"""
