"""`python -m vllm_mtpc` is `vllm-mtpc`."""

import sys

from vllm_mtpc.cli import main

sys.exit(main())
