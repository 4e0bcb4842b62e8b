"""The stash of layer inputs, and the boundary, what passes between layers: on the device, on the host, or in a file;
which of them, and how rows travel there and back. Nothing here knows what a layer computes."""
