"""Which folders the wheel is made of; all else is in pyproject.toml.

configs/ lies beside the packages and is installed inside one, as fedecider.configs. pyproject.toml can say so only with
a list of every package, which would drift.
"""

from setuptools import find_namespace_packages, setup

PACKAGES = ["fedecider*", "idgen*", "distill*", "embedding_fr*"]

setup(
    packages=[*find_namespace_packages(include=PACKAGES), "fedecider.configs"],
    package_dir={"fedecider.configs": "configs"},
)
