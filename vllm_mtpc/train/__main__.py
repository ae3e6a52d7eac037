"""``python -m vllm_mtpc.train``: trains, evaluates and writes the demo assets."""

import argparse
from pathlib import Path

from vllm_mtpc import demo


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m vllm_mtpc.train", description=__doc__)
    parser.add_argument("--only", choices=("target", "heads"), help="train this part alone; heads need a target there")
    parser.add_argument("--quick", action="store_true", help="a few steps and contexts, to try the pipeline (minutes)")
    parser.add_argument("--out", type=Path, default=demo.path("target").parent, help="folder of the assets")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's own choice)")
    return parser


def main() -> None:
    """Runs what was asked for."""
    arguments = parser().parse_args()
    # Imported late: --help should not wait for torch and transformers.
    from vllm_mtpc.train import pipeline

    pipeline.run(arguments.only, arguments.quick, arguments.out, arguments.threads)


if __name__ == "__main__":
    main()
