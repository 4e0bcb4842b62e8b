"""What passes between the hosts that train one model: gradient sums, new weights, and the optimizer's state.

Each host has all masters, and the optimizer's state of the parameters that its ranks own.
"""
