"""Packaging of elastic-xla; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import setup

PACKAGES = [
    "grab_xla",
    "grab_xla.balancers",
    "grab_xla.balancing",
    "grab_xla.contrib",
    "grab_xla.epoch",
    "grab_xla.herding",
    "grab_xla.projection",
    "per_sample_grad",
    "per_sample_grad.engine",
    "per_sample_grad.factors",
    "per_sample_grad.layers",
    "per_sample_grad.pool",
    "rigl_xla",
    "rigl_xla.contrib",
    "rigl_xla.layers",
    "rigl_xla.report",
    "rigl_xla.semi_structured",
    "rigl_xla.state",
    "rigl_xla.topology",
    "rigl_xla.update",
    "variable_batch_size",
    "variable_batch_size.checkpoint",
    "variable_batch_size.data",
    "variable_batch_size.gradient_noise",
    "variable_batch_size.rules",
    "variable_batch_size.step",
    "variable_batch_size.traces",
    "xla_replica",
    "xla_replica.backends",
    "xla_replica.common",
    "xla_replica.device",
    "xla_replica.emulated",
    "xla_replica.starting",
]

setup(
    name="elastic-xla",
    version="0.1.0",
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
    package_data={package: ["py.typed"] for package in PACKAGES if "." not in package},
    # torch is pinned in the xla extra only: torch_xla needs exactly 2.9, its successor
    # torch_tpu needs 2.11 or newer, and everybody else wants their own.
    install_requires=["torch", "numpy", "pandas", "tensorboardX", "tqdm"],
    extras_require={
        "xla": ["torch_xla==2.9.0", "torch>=2.9,<2.10"],
        "tpu": ["torch_tpu", "torch>=2.11"],
        # Balancing on a CPU: without it, a few times slower.
        "grab": ["numba"],
        # PoolScores.to_parquet.
        "parquet": ["pyarrow"],
        "examples": ["torchvision", "scikit-learn", "matplotlib", "numba"],
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "scikit-learn",
            "matplotlib",
            "numba",
            "pyarrow",
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
