"""`python -m lowtide` is the command `lowtide`."""

from __future__ import annotations

import sys

from lowtide.cli import main

sys.exit(main())
