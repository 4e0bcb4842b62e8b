"""Logits that are not there: an output embedding returns a tensor that knows how to make its logits, and losses make
them for a chunk of tokens at a time, so that device memory does not grow with tokens times vocabulary."""
