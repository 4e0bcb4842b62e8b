"""Enables the simulated accelerator before anything runs a backward; these tests need a process of their own."""

from __future__ import annotations

from hf_l2l.testing import enable_simulated_accelerator

enable_simulated_accelerator()
