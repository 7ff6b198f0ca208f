"""The command `python -m kd_export`: the same as `kd-export`."""

from kd_export.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
