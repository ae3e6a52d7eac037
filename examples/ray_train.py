"""Train a head in several processes by Ray Train: python examples/ray_train.py 8 run.yaml

The file is that of `vllm-mtpc train --config`, with absolute paths that every node sees.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from vllm_mtpc.files import read_yaml
from vllm_mtpc.train.command import check_earlier_run
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.run import train, with_defaults


def train_worker(config: dict[str, Any]) -> None:
    sys.argv = config["argv"]  # the head's card has the command
    train(with_defaults(parse(config["options"], "train")))


def main(workers: str, file: str) -> None:
    options = read_yaml(Path(file))
    check_earlier_run(parse(options, file))
    scaling = ScalingConfig(num_workers=int(workers), use_gpu=torch.cuda.is_available())
    storage = RunConfig(name="ray", storage_path=options["out"])
    config = {"options": options, "argv": sys.argv}
    TorchTrainer(train_worker, train_loop_config=config, scaling_config=scaling, run_config=storage).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
