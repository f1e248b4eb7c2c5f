"""These tests run Triton's kernels in its interpreter, which must be chosen before Triton is imported.

So they have a process of their own, `TRITON_INTERPRET=1 pytest tests/kernels/interpreter`, which is what
`make kernels-test` starts, and are left out of any other.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
