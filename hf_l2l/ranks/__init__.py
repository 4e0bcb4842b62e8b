"""The processes (ranks) that train one model together: sockets and shared memory of a host, groups between hosts, who
owns what.

Nothing here knows of layers, gradients or updates; what the EPS does with several ranks is in `shared_eps`.
"""
