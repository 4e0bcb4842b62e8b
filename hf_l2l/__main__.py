"""`python -m hf_l2l` is `hf-l2l`."""

from __future__ import annotations

import sys

from hf_l2l.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
