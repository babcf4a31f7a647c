"""Entry of `packtrain` and `python -m service`: checks where the sources come from, then starts the CLI."""

import sys

from service.origin import OriginError, find_source_root


def main() -> None:
    """Run the command line. Exits with 2 where the sources are mixed up."""
    try:
        find_source_root()
    except OriginError as error:
        sys.stderr.write(f"packtrain: {error}\n")
        raise SystemExit(2) from None
    from service import cli  # only now: its imports reach jobs and ops

    cli.main()


if __name__ == "__main__":
    main()
