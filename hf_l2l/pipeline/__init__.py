"""Several devices in one process: the modular pipeline of layered gradient accumulation, over streamed layers."""
