"""The `headrace` script: hands over to the CLI, or says which extra is missing.

Light on purpose: a base install has no typer, and must still answer with a sentence instead of a
traceback.
"""

from __future__ import annotations

import sys

EXTRA_OF = {
    "typer": "service",
    "rich": "service",
    "fastapi": "service",
    "starlette": "service",
    "uvicorn": "service",
    "uvloop": "service",
    "httptools": "service",
    "msgspec": "service",
    "pydantic": "service",
    "pydantic_settings": "service",
    "structlog": "service",
    "xxhash": "service",
    "torch": "torch",
    "safetensors": "demo",
    "matplotlib": "demo",
}


def main() -> int:
    """Run the CLI; exit status 2 and one line on stderr where a package of an extra is not
    installed.
    """
    try:
        from headrace.service.cli import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA_OF:
            raise
        extra = EXTRA_OF[missing]
        print(
            f"headrace: the package {missing!r} is not installed; it comes with the extra "
            f"[{extra}]: pip install 'headrace[{extra}]'",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
