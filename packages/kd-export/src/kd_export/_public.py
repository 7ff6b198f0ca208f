"""Where public names say that they are defined: the package that users import them from."""

import sys


def publish(package: str) -> None:
    """Set `__module__` of what a package exports; call it last in the `__init__`.

    `kd_core.extending` has the same for packages that need torch anyway.
    """
    for name, value in vars(sys.modules[package]).items():
        if not name.startswith("_") and f"{value.__module__}.".startswith(f"{package}._"):
            value.__module__ = package
