"""Install the packages that `real.py` reads, each into a folder of its own: `python benchmarks/packages/install.py DIR`.

Only the packages are installed, not what they need: that is in the environment, or a few light packages beside them.
"""

import argparse
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "AttentionMechanism": "1.0.2",
    "attention-smithy": "1.3.0",
    "attnhut": "0.5.0",
    "d2l": "1.0.3",
    "flashmha": "0.6.3",
    "forgenn-ml": "1.0.0",
    "glassllm": "0.1.0",
    "llm-from-scratch": "0.1.0",
    "llms-from-scratch": "1.0.19",
    "nanodl": "0.0.0",
    "neuralnetlib": "5.0.0",
    "simple-transformer": "0.0.1",
    "tfs-mt": "0.1.3",
    "torch-multi-head-attention": "0.15.1",
    "transformer-pytorch": "0.0.1",
    "transformers-from-scratch": "0.1.2",
    "vit-pytorch": "1.26.14",
    "wyn-transformers": "0.1.8",
}
NEEDED = {"attention-smithy": ["rotary-embedding-torch==0.9.1"]}
"""What is light, and missing in the environment."""


def install(name: str, directory: Path, /) -> bool:
    """Install one package; `--ignore-requires-python` since one asks for a newer Python than it uses."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--ignore-requires-python"]
    wanted = [f"{name}=={PACKAGES[name]}", *NEEDED.get(name, [])]
    command = [sys.executable, "-m", "pip", "install", *options, "--upgrade", "--target", str(directory / name), *wanted]
    return subprocess.run(command, check=False).returncode == 0  # noqa: S603  # the command is all our own


def main() -> int:
    """Install all of them, and tell which failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to")
    directory = parser.parse_args().directory
    failed = [name for name in PACKAGES if not install(name, directory)]
    sys.stdout.write(f"installed {len(PACKAGES) - len(failed)} of {len(PACKAGES)} into {directory}\n")
    sys.stdout.writelines(f"failed: {name}=={PACKAGES[name]}\n" for name in failed)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
