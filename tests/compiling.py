"""Flags for programs that only have to run: they compile in half the time.

Not for tests of numbers, which should check the machine code that users run. XLA aborts
on flags that it does not know, so other versions of it get none.
"""

import jax

_KNOWN = jax.__version__.startswith("0.10.")
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
QUICK_FLAGS = _FLAGS if _KNOWN else ""
