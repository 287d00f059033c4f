"""Packaging of elastic-xla; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
NAMES = [
    "grab_xla",
    "per_sample_grad",
    "rigl_xla",
    "variable_batch_size",
    "xla_replica",
]
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for name in NAMES
    for path in (ROOT / name).rglob("__init__.py")
)

TORCH_XLA, TORCH_OF_XLA = "torch_xla==2.9.0", "torch>=2.9,<2.10"

setup(
    name="elastic-xla",
    version="0.2.0",
    description=(
        "PyTorch and PyTorch/XLA training whose number of accelerators, and so batch "
        "size, changes while it runs"
    ),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=PACKAGES,
    package_data={package: ["py.typed"] for package in NAMES},
    entry_points={"console_scripts": ["vbs = variable_batch_size.command_line:main"]},
    # torch is pinned in these extras only: torch_xla needs exactly 2.9, its successor
    # torch_tpu 2.11 or newer (and Python 3.11), so that no environment has both, and
    # everybody else wants their own.
    install_requires=["torch>=2.9", "numpy", "pandas", "tensorboardX", "tqdm"],
    extras_require={
        # XLA replicas emulated on a CPU.
        "xla-cpu": [TORCH_XLA, TORCH_OF_XLA],
        "xla": [TORCH_XLA, TORCH_OF_XLA],  # its earlier name
        # A TPU VM: torch_xla's own extra brings libtpu.
        "xla-tpu": [TORCH_XLA.replace("==", "[tpu]=="), TORCH_OF_XLA],
        # A TPU VM with TorchTPU, which brings libtpu itself.
        "torchtpu": ["torch_tpu>=0.2", "torch>=2.11"],
        # Balancing on a CPU: without it, a few times slower.
        "grab": ["numba"],
        # Replicas that run a function of a notebook.
        "notebook": ["cloudpickle"],
        # Pictures: vbs plot --out.
        "plot": ["matplotlib"],
        # Pages about runs: vbs report.
        "report": ["plotly>=6"],
        # PoolScores.to_frame().to_parquet, BlockDataset.from_parquet.
        "parquet": ["pyarrow"],
        # variable_batch_size.integrations.hugging_face;
        # examples/ordering/causal_language_model.py --model gpt-neox.
        "transformers": ["accelerate>=1.15,<2", "transformers>=5.23,<6"],
        # variable_batch_size.integrations.lightning
        "lightning": ["lightning>=2.6,<3"],
        # examples/launch/ray_train.py
        "ray": ["ray[train]>=2.60"],
        # Members that come and go (LIVE_LIGHTHOUSE): its lighthouse tells who lives.
        "live": ["torchft>=0.2,<0.3"],
        "examples": [
            "torchvision",
            "scikit-learn",
            "matplotlib",
            "numba",
            "tensorboard",
        ],
        "test": [
            "cloudpickle",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "scikit-learn",
            "matplotlib",
            "mypy>=2.4,<2.5",  # what is strict is another thing in the next one
            "numba",
            "plotly>=6",
            "pyarrow",
            "expecttest",  # torch's own tests, whose optimizers we run, import it
            "torchft>=0.2,<0.3",
        ],
        # Other people's tests and models (docs/outside.md), on torch 2.13.
        "outside": [
            "accelerate==1.15.0",
            "datasets==5.2.0",
            "ipykernel==7.4.0",
            "jsonschema==4.26.0",
            "kubeflow-trainer-api==2.3.0",
            "lightning==2.6.6",
            "mlflow-skinny==3.17.2",
            "nbclient==0.11.0",
            "opacus==1.6.0",
            "peft==0.21.2",
            "pyyaml==6.0.3",
            "ray[train]==2.60.0",
            "schedulefree==1.4.1",
            "timm==1.0.31",
            "torchdata==0.11.0",
            "torchvision==0.28.0",
            "transformers==5.23.0",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
