"""What the devices of the ranks of one host do together: they add gradients, of which each rank downloads its share.

The engine of that is torch.distributed with the backend of the device (NCCL for CUDA).
"""
